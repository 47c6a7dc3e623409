"""Changes to try if a setup does not fit: settings that need less memory, or more GPUs.

Read in this order:
    remedies.py      changed settings, each predicted to fit
    larger_world.py  the same setup on more GPUs
    nothing_fits.py  for max-size, if no setting fits: the nearest one, and what would help
"""
