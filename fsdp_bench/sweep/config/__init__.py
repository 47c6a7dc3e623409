"""From a sweep file to its trials.

Read in this order:
    sweep_file.py  reads a sweep file: [run], every key with its default; crosses [grid] and [[include]] to cells
    models.py      [models.NAME], model and params: the model of a cell, a benchmark model or one given by its code
    grid.py        resolves cells on a machine: defaults, [[exclude]], what cannot run; makes each one a trial
    trial.py       a trial, its label, and its ID: a trial is done when a record with this ID exists
    reading.py     checks keys and values, with errors that name their place in the file

In every file a SpecError says what is not allowed: it names the place, the value and what is allowed, or the nearest
known name. read_file, trials_of and searches_of put the file's name before it (SweepFileError).
"""
