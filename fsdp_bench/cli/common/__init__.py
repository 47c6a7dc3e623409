"""Options and output that commands share.

Read in this order:
    options.py     the options that describe a setup
    lists.py       options of several values, and every combination of them
    setups.py      from options to a model, a setup and hardware
    assumptions.py kernels, memory, rates; and a question for every combination of all options
    tables.py      the options that sort, select and write tables
    progress.py    the progress of many predictions
    facts.py       facts of the catalogue as lines
    sweeping.py    output of the commands that run or read trials
    cluster.py     a sweep on several nodes
    frontier.py    a sweep file with [frontier]
    forgiving.py   printing that may fail
    charts.py      writing charts into files
    exports.py     --export: the chosen setting as files
    interrupts.py  Ctrl-C, SIGTERM and a closed terminal
"""
