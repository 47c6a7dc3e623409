"""A report as one HTML file: no network, readable without JavaScript, everything that comes from a file is escaped.

Read in this order:
    write.py      write(): from what a file or folder holds to a page on the disk
    blocks.py     what a page is made of: sections of tables, facts, bars and plots
    scales.py     axes: from values to places and ticks
    documents.py  the JSON documents that are read, checked
    predicted/    the pages of plans, predicted setups and largest models
    measured/     the page of measured or rehearsed trials
    step.py       one step: memory over it, and what runs when
    render.py     from blocks to HTML, by the templates
    templates/    HTML, CSS and JavaScript
"""

from fsdp_bench.report.html.write import write as write
