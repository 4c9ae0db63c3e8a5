"""How good a model is: cloze accuracy, perplexity and validation loss, with standard errors, on any parallel layout."""
