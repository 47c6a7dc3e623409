"""One source of numbers against another: predicted, dry run, measured and published.

``memory.py`` and ``step_time.py`` compare predictions with dry runs and measured trials, ``emulation.py`` emulated
trials with real ones, ``published/`` predictions with other people's measurements. ``random_setups.py`` draws setups.
"""
