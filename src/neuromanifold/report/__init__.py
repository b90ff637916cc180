"""The page about a result, its matplotlib figures, and what a notebook shows.

result ─► summarize (results) ─► data of each chart and table (one file each) ─► templates/*.html, or matplotlib
                             └─► sentences (`reading`)

A chart's data are made apart from its drawing, so that what a plot says is tested without the plot.
"""
