"""A report as one HTML file: no network, readable without JavaScript, everything that comes from a file is escaped.

Read in this order:
    write.py       write(): from what a file or folder holds to a page on the disk; charts as SVG paths
    blocks.py      what a page is made of: sections of facts, tables and the charts of report/charts
    prediction.py  the pages of predicted or dry-run setups, and of the largest that fits
    plan.py        the page of a plan
    rehearsal.py   the page of a rehearsed script
    sweep.py       the page of measured or rehearsed trials, and of a sweep's searches
    errors.py      predictions of trials beside what was measured; one predicted step
    templates/     HTML, CSS and JavaScript
"""

from fsdp_bench.report.html.write import write as write
