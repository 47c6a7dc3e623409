"""Starting a trial's ranks: on this machine, or on several nodes.

Read in this order:
    launcher.py        what all launchers have in common
    one_node.py        all ranks on this machine: forked from a process that has imported torch, or by a new torchrun
    choose.py          the nodes of a sweep
    slurm.py           several nodes of a Slurm job, by srun; the job: its nodes, its time, how it is requeued
    torchrun_nodes.py  several nodes on which the same command was started
    processes.py       starts, finds and ends processes, and reads their logs
"""
