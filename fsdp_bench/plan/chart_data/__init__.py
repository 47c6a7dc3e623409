"""The data of the predicted charts; report/charts draws them.

Read in this order:
    memory_timeline.py  live memory over one step
    step_streams.py     what runs when on which stream
"""
