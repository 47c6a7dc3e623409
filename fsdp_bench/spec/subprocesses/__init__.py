"""The requests and answers of subprocesses: dry runs, rehearsals, descriptions.

Not here are the input of a trial's ranks and what they report, because both are part of its record: record.py and
rank_report.py beside this folder.

Read in this order:
    dry_run.py    a model and a setup; the live bytes of one training step
    rehearsal.py  a GPU and one rank of a command; what its script did
    issued.py     what a rehearsed script issued in one step
    own_python.py  the command that starts one
    model_code.py  a model's code; what it builds, and its recording
"""
