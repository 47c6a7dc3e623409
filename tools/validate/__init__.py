"""Predictions against dry runs and rehearsals of drawn setups, and against other people's measurements.

Read in this order:
    __main__.py             ``python -m tools.validate``
    random_setups.py        draws setups of benchmark models, and those whose blocks are compiled
    random_architectures.py draws small models of the catalogue in Hugging Face's or torchtitan's code, and setups
    dry_run.py              predictions against dry runs of drawn setups
    rehearsal.py            predictions against rehearsals of drawn setups, which it runs without a sweep file
    observer.py             drawn scripts, rehearsed with and without --time
    published/              predictions against other people's measurements
"""
