"""Results on disk, and the tables made of them.

Read in this order:
    store.py          one sweep's folder: writes and reads trials/ID.json and the other files
    lock.py           one writer at a time, on any node
    load.py           reads records from any results folder; load_results()
    flat.py           a record as one row: the columns of trials.csv and frontier.csv
    communication.py  collectives of a step by kind
"""
