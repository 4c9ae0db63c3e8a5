"""Text to batches: tokenizers, indexed datasets, preprocessing, and the samples that training reads."""
