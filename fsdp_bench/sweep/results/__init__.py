"""Results on disk, and the tables made of them.

Read in this order:
    store.py          one sweep's folder: writes and reads trials/ID.json and the other files
    lock.py           one writer at a time, on any node
    load.py           reads records from any results folder; load_results()
    flat.py           records as rows: trials.csv, frontier.csv, and collectives by kind
"""
