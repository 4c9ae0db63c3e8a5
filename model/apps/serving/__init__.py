"""An OpenAI-style completions endpoint for a trained model.

protocol.py is its language, worker.py its one model, app.py its web server. Nothing a client sends is trusted: sizes
are bounded before they are read, and what is not supported is refused.
"""
