"""Questions and answers: does it fit, how fast is it, what is the largest model, what would help.

``ask.py`` has the functions that Python users call. ``estimate.py`` predicts memory, ``speed.py`` time;
``question.py`` puts both into one answer, ``document.py`` writes it as JSON. ``search/`` finds the largest model,
micro-batch or sequence that fits, ``max_size.py`` for many settings. ``advice/`` looks for settings that fit where the
asked one does not. ``headroom.py`` and ``gpu_memory_option.py`` say how much of a GPU there is, ``defaults.py`` what is
assumed where the user says nothing. ``chart_data/`` computes what charts show.
"""
