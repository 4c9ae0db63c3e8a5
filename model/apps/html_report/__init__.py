"""`hal report`: runs and parity results as a self-contained HTML page.

record.py reads the records of runs, chart.py draws curves, page.py and report.html.j2 make the page. Files are shown as
text and cannot add markup to the page.
"""
