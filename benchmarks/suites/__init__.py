"""The cases of `hal bench`, one file per suite."""
