"""Predictions, dry runs and searches as text on the terminal: the answer first, then its reasons.

Read in this order:
    conditions.py        what answers hold for: model, setup, hardware, memory kept free; also on pages and in pictures
    prediction.py        one prediction: whether it fits, in one line; peak, breakdown, time
    speed.py             step time, exposed communication, tokens per second
    prediction_table.py  several predictions in one table; cells and headers of every column that it can have
    plan.py              which servers, how many, which setting: the winner and the offers beside it
    max_size.py          the largest model that fits, one row for each setting; what would help if nothing fits
    quantities.toml      the names of what is searched
    dry_run.py           dry runs: live bytes, and whether the setup fits
    compare.py           which bytes and milliseconds differ between two setups or results, and why
    compare_scripts.py   which bytes by line and milliseconds by operator differ between two scripts; a gate's line
    check.py             many scripts against a baseline, as Markdown
    rehearsal.py         a rehearsed script: where it peaks, what holds memory, how long a step takes
    each.py              a script with several values: the fastest or the largest that fits, a row for each
    catalog_entry.py     a GPU and a server as TOML, what is unknown of them as comments
    unknown_facts.toml   those comments
    common.py            text for unknown values, NCCL's memory, exported files; lines of a name and a value
"""
