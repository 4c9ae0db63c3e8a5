"""Files and signals, used throughout the model folder. Nothing here depends on models."""
