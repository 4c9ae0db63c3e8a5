"""The trainer: data, model, optimizer and schedule over any communicator."""
