"""Questions about a user's own script: the same command with several values, each of them rehearsed.

Read in this order:
    template.py    a command with placeholders, and what stands for them
    edit.py        values in copies of configuration files
    variants.py    the combinations that are asked for: placeholders, hardware, strategies
    kept.py        what an interrupted question had found, so that the same command resumes
    rehearsals.py  rehearses variants, several at once where memory allows
    each.py        rehearse(): every combination, as rows and as a JSON document
    quantity.py    the placeholder whose largest value is searched, and its values
    border.py      which values to rehearse next, until one fits and the next one does not
    largest.py     largest_value(): the border for every combination; of two placeholders the frontier
    cells.py       what is known of one choice of values on so many servers of one kind, from rehearsals of cells
    series.py      one choice on servers of one kind: what few rehearsals tell of all numbers of nodes
    purchase.py    plan_command(): which servers, how many, which values: days, price
"""
