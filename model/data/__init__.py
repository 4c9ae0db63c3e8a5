"""The data pipeline: tokenizers, indexed datasets, preprocessing, and the samples that training reads."""
