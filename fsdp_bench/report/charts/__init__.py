"""All charts: each is described once, and drawn by matplotlib as a slide and by report/html on a page.

Read in this order:
    description.py      parts of a chart: plots, lanes and bars in the units of their axes; a slide with its conditions
    axis.py             axes: where a value stands, ticks at round numbers
    colors.py           the palette and the styles of marks
    palette.toml        colours on light and dark backgrounds
    memory_timeline.py  predicted memory over one training step
    step.py             what a predicted step consists of, and what runs when on each stream
    trade_off.py        memory against speed, one point for each setup or trial
    scaling.py          predicted tokens per second over the number of nodes
    rehearsal.py        a rehearsed script: memory to its last step, of several values, and where it no longer fits
    max_size.py         bars of the largest value that fits; max-size's answers as such bars
    frontier.py         a frontier sweep as such bars: measured sizes beside predicted ones
    trial_facts.py      a trial's settings and conditions, as charts name them
    trial_slides.py     measured and rehearsed trials: which are in one chart, their order, labels and conditions
    trial_bars.py       draws them as bars: peak memory, throughput, communication
    slide.py            draws a slide with matplotlib: title, conditions, legend; plots, lanes and bars
"""
