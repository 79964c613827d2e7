"""One run as a page of HTML that needs no network: its events are read, put together, and drawn.

The content is data first (`run.py`, `series.py`), then charts and text. Only the files `*figures.py` know the
library of charts.
"""
