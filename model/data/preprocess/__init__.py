"""Preprocessing of text into Megatron's indexed datasets: the implementation of `hal data`; see preprocess.py."""
