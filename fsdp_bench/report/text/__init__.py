"""Predictions, dry runs and searches as text on the terminal: the answer first, then its reasons.

Read in this order:
    prediction.py        one prediction: peak, breakdown, time
    verdict.py           whether a setup fits, in one line
    speed.py             step time, exposed communication, tokens per second
    prediction_table.py  several predictions in one table
    plan.py              which servers, how many, which setting: the winner and the offers beside it
    exports.py           files of an exported setting, and how they start
    max_size.py          the largest model that fits, one row for each setting
    quantity_text.py     names of what max-size searches: model size, layers, batch, sequence, GPUs
    nothing_fits.py      if nothing fits: what the nearest setting needs, and what would help
    dry_run.py           dry runs: live bytes, and whether the setup fits
    rehearsal.py         a rehearsed script: where it peaks, what holds memory, what it read from the GPU
    communicators.py     NCCL's communicators and their GPU memory
    common.py            text for unknown values, hardware, and lines of a name and a value
"""
