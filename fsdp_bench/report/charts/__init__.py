"""All charts, drawn with matplotlib.

Read in this order:
    figure.py           the frame of every chart: title, conditions, colours, legend, saving to a file
    max_size.py         draws the max-size chart: bars of the largest model that fits
    max_size_rows.py    turns max-size's answers into the rows and labels that max_size.py draws
    frontier.py         turns a frontier sweep into rows for max_size.py: measured sizes beside predicted ones
    memory_timeline.py  draws predicted memory over one training step
    rehearsal.py        draws allocated and reserved memory of a rehearsed script
    step.py             draws the streams of a predicted step: compute, collectives, exposed communication
    step_parts.py       draws what a predicted step consists of
    scaling.py          draws predicted tokens per second over the number of nodes
    trade_off.py        draws predicted memory against speed, one point for each setup
    trials/             draws measured and rehearsed trials: peak memory, throughput, communication
"""
