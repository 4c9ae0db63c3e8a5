"""Runs cases, times them against their peers, and reports the results."""
