"""Other people's measurements (catalog/published.csv) and what is predicted for them.

``cases.py`` reads the rows, ``setups.py`` and ``hardware.py`` express them in this package's terms or say why not;
``peaks.py``, ``fits.py`` and ``speed.py`` compare. ``terms.py`` names what the measured code keeps alive beyond ours.
"""
