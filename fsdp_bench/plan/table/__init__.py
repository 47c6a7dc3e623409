"""Several answers as a table: rows of plain values, which are sorted, selected, printed and written as CSV.

Read in this order:
    columns.py   names of columns as users write them; --sort, --columns, --only-fits
    rows.py      a prediction, or a setting of max-size, as a row: bytes and seconds, with the unit in each name
"""
