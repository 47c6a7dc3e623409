"""From a sweep file to its trials.

Read in this order:
    sweep_file.py  reads a sweep file: a list of its tables
    run_table.py   [run]: every key with its default
    cells.py       [grid], [[include]] and [[exclude]]: the cells
    shapes.py      [models.NAME], model and params: the model of a cell
    model_code.py  [models.NAME] of Hugging Face's or a user's code
    grid.py        makes each cell a trial
    trial.py       a trial and its label
    trial_id.py    hashes what decides a trial's outcome; a trial is done when a record with this ID exists
    selection.py   --only and --part: which trials to run
    reading.py     checks keys and values, with errors that name their place in the file
"""
