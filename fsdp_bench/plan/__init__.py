"""Questions and answers: does it fit, how fast is it, what is the largest model, what would help.

``ask.py`` holds the functions that Python users call. ``estimate.py`` predicts memory, ``speed.py`` time, and
``question.py`` puts both into one answer with its JSON form. ``search/`` finds the largest model, batch or sequence
that fits. ``advice/`` looks for settings that fit where the asked one does not; ``chart_data/`` prepares charts.
"""
