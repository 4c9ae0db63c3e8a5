"""Inference with a trained model: loading, decoding and text generation."""
