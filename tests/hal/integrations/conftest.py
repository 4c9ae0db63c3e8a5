"""The backends that models of other frameworks run on here."""

from active_backend import cpu_ref, simulated_npu  # noqa: F401
