"""A report as one HTML file: no network, readable without JavaScript, everything that comes from a file is escaped.

Read in this order:
    write.py      write(): from what a file or folder holds to a page on the disk
    blocks.py     what a page is made of: sections of facts, tables and the charts of report/charts
    documents.py  the JSON documents that are read, checked
    predicted/    the pages of plans, predicted setups and largest models
    measured/     the page of measured or rehearsed trials
    render.py     from blocks to HTML, by the templates
    svg.py        from charts to SVG paths and places in percent
    templates/    HTML, CSS and JavaScript
"""

from fsdp_bench.report.html.write import write as write
