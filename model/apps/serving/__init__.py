"""An OpenAI-style completions endpoint for a trained model.

protocol.py validates requests and builds responses, worker.py runs the model, and app.py is the web server. Input from
clients is not trusted: sizes are bounded before data is read, and unsupported features are refused.
"""
