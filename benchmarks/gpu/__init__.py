"""`make gpu`: everything that needs an NVIDIA GPU, in parts that can be interrupted."""
