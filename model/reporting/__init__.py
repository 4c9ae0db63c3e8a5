"""`hal report`: runs and parity results as one HTML page that needs nothing but a browser.

record.py reads what runs left, chart.py draws curves, page.py makes the page. Everything read is shown as text: a file
cannot bring markup or scripts onto the page.
"""
