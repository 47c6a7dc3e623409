"""Changes to try if a setup does not fit: settings that need less memory, or more GPUs.

Read in this order:
    remedies.py      changed settings and more GPUs, each predicted to fit
    nothing_fits.py  for max-size, if no setting fits: the nearest one, and what would help
"""
