"""Trainers under any parallel layout, one process per rank, and what is measured of them."""
