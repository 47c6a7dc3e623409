"""Options and output that commands share.

Read in this order:
    options.py     the options that describe a setup
    setups.py      from options to a model, a setup and hardware
    facts.py       facts of the catalogue as lines
    sweeping.py    output of the commands that run or read trials
    frontier.py    a sweep file with [frontier]
    forgiving.py   printing that may fail
    charts.py      writing charts into files
    exports.py     --export: the chosen setting as files
    interrupts.py  Ctrl-C, SIGTERM and a closed terminal
"""
