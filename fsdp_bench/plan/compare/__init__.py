"""Two setups, results or scripts side by side: which bytes and which milliseconds differ, and why.

Read in this order:
    difference.py  a number of both
    side.py        one of the two: a document of predict or dry-run, a record of a trial, or an answer of estimate()
    comparison.py  compare(): the differences, B less A, and their JSON form
    reasons.py     why: mechanisms of FSDP that the setups differ in, each with the bytes and seconds that show it
    scripts.py     two rehearsals of scripts: bytes by line, seconds by operator; a gate: is one worse than its baseline
    lines.py       which line of one is which line of the other
"""
