"""The processes of a trial: how ranks start, meet, run and end.

Read in this order:
    worker.py                runs one rank: joins the process group, measures, writes its report
    measurement.py           the measurement: model, load, warm-up, measured steps, profiled steps
    rank.py                  a rank's state, report and files; the outcome of an exception; where ranks find each other
    server.py                the fork server: forks the ranks of one trial after another
    torchrun.py              starts torchrun, on one node or on each of several; a rank under torchrun
    child.py                 ends a process with its parent; answers of a process as JSON
    backends.py              what this torch can do, for fsdp-bench doctor
"""
