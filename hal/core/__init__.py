"""Ops, backends, and which implementation a call runs on. `hal` exports the public names."""
