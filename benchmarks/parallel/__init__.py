"""Trainers under any parallel layout, one process per rank, and measurements of them."""
