"""What a layout costs, by formula: bytes per device, bubble, traffic and step time, for any number of devices.

The layouts are the trainer's own (`model/parallel/plan.py` decides what is legal); the bytes are those that it was
measured to hold (`hal bench scaling`, docs/scaling.md). Nothing here runs a model or needs a device.
"""
