"""Other people's measurements and the predictions for them.

Read in this order:
    published.csv  peak memory, throughput, fits or not
    cases.py       reads the rows; GPUs and networks under the names that publications use
    setups.py      a row as a model, a setup and hardware, or the reason why it cannot be one
    peaks.py       compares peaks of memory, and outcomes: fits, or out of memory; as text
    terms.py       tensors that other frameworks keep alive and our models do not
    speed.py       compares throughput
    ranges.py      the errors of speed and memory, for plans; the comparison of throughput as text
    own_run.py     how well one run of a publisher predicts its others
    rehearsed.py   compares peaks of memory with rehearsals of the very code that was run; as text
    sizes.py       compares the one published chart of largest models; as text and as a chart
"""
