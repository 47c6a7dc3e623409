"""Options and output that commands share.

Read in this order:
    options.py     the options that describe a setup, and every combination of several values
    lists.py       options of several values
    setups.py      from options to a model, a setup and hardware
    assumptions.py kernels, memory, rates; and a question for every combination of all options
    printing.py    what commands print: answers, documents, tables, progress, facts of the catalogue, charts in files
    exports.py     --export: the chosen setting as files
    interrupts.py  Ctrl-C, SIGTERM and a closed terminal; printing that may fail
"""
