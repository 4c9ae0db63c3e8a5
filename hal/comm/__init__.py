"""Communicators: the contract, and the transports that HAL itself provides."""
