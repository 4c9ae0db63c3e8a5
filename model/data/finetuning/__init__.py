"""Supervised finetuning: examples with answers, rendered, packed and given to the trainer as batches."""
