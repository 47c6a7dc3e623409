"""Two setups or results side by side: which bytes and which milliseconds differ, and why.

Read in this order:
    side.py        one of the two: a document of predict or dry-run, a record of a trial, or an answer of estimate()
    comparison.py  compare(): the differences, B less A, and their JSON form
    reasons.py     why: mechanisms of FSDP that the setups differ in, each with the bytes and seconds that show it
"""
