"""The distance of one source of numbers from another, as text and as a page.

Read in this order:
    memory.py      predicted against measured memory
    step_time.py   predicted against measured step time
    page.py        the Markdown page beside results: validation.md
"""
