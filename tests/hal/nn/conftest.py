"""The backends that layers run on here."""

from active_backend import cpu_ref, simulated_npu  # noqa: F401
