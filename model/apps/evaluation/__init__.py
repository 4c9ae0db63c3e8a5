"""Evaluation of a model: cloze accuracy, perplexity and validation loss, with standard errors, on any layout."""
