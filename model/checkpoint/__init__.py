"""What is on disk: checkpoints written atomically, and read without trusting them."""
