"""Files, signals and progress bars, used throughout the model folder. Nothing here depends on models."""
