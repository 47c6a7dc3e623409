"""One file for each command: it parses, calls and prints. No logic.

Read in this order:
    main.py       the command line, and how errors end it
    plan.py, predict.py, max_size.py, record.py, dry_run.py, servers.py, models.py    without a GPU
    compare.py    two setups, results or scripts side by side
    rehearse.py   a real training command, without a GPU
    max_size_script.py, plan_script.py    max-size and plan of such a command
    check.py      many of them, against a baseline
    sweep.py, report.py, chart.py, calibrate.py, doctor.py        measuring, and reading results
    submit.py, status.py   a sweep as a job of Slurm; how far sweeps are
    validate.py   one source of numbers against another
    common/       options and output that commands share
"""
