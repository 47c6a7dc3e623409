"""The matrix of frameworks: real examples of each, unmodified, rehearsed; docs/frameworks.md is written from it.

Read in this order:
    rows/            a TOML file a framework: its releases, and the command of each row
    matrix.py        reads them
    environment.py   an environment with a framework beside torch, and the source of its repository
    rehearsal.py     one row, at one release and number of GPUs
    page.py          docs/frameworks.md
    __main__.py      ``python -m tools.frameworks``
"""
