"""Comparisons with published measurements, as text and as a chart.

Read in this order:
    peaks.py        predicted against published peaks of memory
    fits.py         predicted against published outcomes: fits, or out of memory
    speed.py        predicted against published throughput
    rehearsed.py    rehearsed against published peaks of memory
    sizes.py        predicted against published largest models
    sizes_chart.py  the same as a chart
    left_out.py     assumptions of a comparison, and the rows that are not compared
"""
