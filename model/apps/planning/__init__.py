"""The cost of parallel layouts by formula: memory, pipeline bubble, traffic and step time for any number of devices.

The layouts are those that the trainer accepts (`model/config/parallel_layout.py`); the memory formulas are verified
against the trainer (`hal bench scaling`, docs/scaling.md). Nothing here runs a model or needs a device.
"""
