"""Text, tables, charts and HTML. No other package but cli prints or draws.

Read in this order:
    text/        predictions, dry runs and max-size as text
    measured/    measured trials as tables on the terminal
    validation.py  predictions compared with results, as text and as a page
    charts/      all charts, drawn with matplotlib
    html/        a report as one HTML file
    trace.py     a simulated step for ui.perfetto.dev
    table.py     tables that fit the width of the terminal, or are CSV
    terminal.py  prints, with control characters escaped
"""
