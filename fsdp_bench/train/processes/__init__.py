"""The processes of a trial: how ranks start, meet, run and end.

``server.py`` forks the ranks of one trial after another, ``resident.py`` lets trials of one rank share a process, and
``torchrun.py`` with ``torchrun_rank.py`` starts them by torchrun. In each rank ``worker.py`` runs the trial;
``rank.py`` is its state and report, ``measurement.py`` what it measures. ``rendezvous.py`` is where ranks find each
other, ``parent.py`` ends a process with its parent, ``backends.py`` says what this torch can do.
"""
