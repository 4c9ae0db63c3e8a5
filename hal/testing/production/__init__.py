"""Calls of the sizes that models use: `hal parity --scale production`."""
