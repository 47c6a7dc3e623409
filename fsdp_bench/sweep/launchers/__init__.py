"""Starting a trial's ranks: on this machine, or on several nodes.

Read in this order:
    launcher.py        the interface of all launchers
    start.py           starts processes: their environment, and that they end with this one
    fork_server.py     forks ranks from a process that has imported torch
    torchrun.py        a new torchrun for every trial
    choose.py          on which nodes a sweep runs
    slurm.py           several nodes of a Slurm job, by srun
    slurm_job.py       that job: its nodes, its time, how it is requeued
    torchrun_nodes.py  several nodes on which the same command was started
    processes.py       finds and kills processes that a trial left running
    logs.py            the ranks' log files, limited in size
"""
