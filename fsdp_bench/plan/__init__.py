"""Questions and answers: does it fit, how fast is it, what is the largest model, what would help.

Read in this order:
    ask.py                estimate() and largest_model(), the functions for Python users
    question.py           Question: a setup and its hardware
    prediction.py         Prediction: the answer, predicted
    parallel.py           a function of several items at once, on all cores
    estimate.py           predicts memory, live and reserved
    speed.py              predicts step time, tokens per second, MFU
    measured_run.py       what a user's own run took, from a number, a log or a trace
    scaling.py            rates scaled by such a run
    ranges.py             how far predictions of speed have been from published runs
    headroom.py           GPU memory that is kept free for CUDA and NCCL; --gpu-memory, --headroom, --cuda
    defaults.py           what is assumed if the user does not state it, by whose code it is
    recording.py          finds a model, or records its code in a subprocess
    search/               the largest candidate that fits
    max_size.py           the answers of max-size: a search for each setting, and what would help if nothing fits
    compare/              two setups, results or scripts side by side, and why they differ
    setup_text.py         setups as text: one as a line, several by what differs between them
    table.py              several answers as rows, and their columns by name
    purchase/             which servers, how many, which setting: days, price, energy
    export/               one setting as files that train it
    remedies.py           settings, or more GPUs, that fit if the given setup does not
    chart_data.py         the data of predicted charts
    dry_run.py            whether a setup fits, from its dry run
    rehearse_command.py   rehearse_command(): a real training command as one rank
    random_data.py        what --random-data says
    rehearsal.py          whether a rehearsed script fits
    script/               one command with several values, each of them rehearsed; plans for it
    rehearsed_time/       how long a step of a rehearsed script would take
    rehearsal_document.py the JSON form of a rehearsal
    check.py              check(): many commands against a baseline
    document.py           the JSON form of an answer, predicted or dry-run, which tables and pages read
"""
