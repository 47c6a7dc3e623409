"""The distance of one source of numbers from another, as text and as a page.

Read in this order:
    memory.py              predicted against dry-run and measured memory
    step_time.py           predicted against measured step time
    published_peaks.py     predicted against published peaks of memory
    published_fits.py      predicted against published outcomes: fits, or out of memory
    published_speed.py     predicted against published throughput
    published_rehearsed.py rehearsed against published peaks of memory
    published_sizes.py     predicted against published largest models
    left_out.py            assumptions of a comparison, and the rows that are not compared
    page.py                the Markdown page beside results: validation.md
"""
