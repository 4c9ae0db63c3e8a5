"""HAL: one GPT, any accelerator.

`hal.use("cpu_ref")` chooses the backend; `hal.ops` holds the operations; a third party adds hardware by subclassing
`hal.Backend`. Importing hal imports torch and nothing else: no vendor package, no op, no model.
"""

from .backend import API, Backend, Impl, Probe
from .comm import Comm, Solo
from .dispatch import Why, activate, activated, backend, device, fallbacks, policy, use, why
from .errors import (
    BackendNotFound,
    BackendUnavailable,
    CollectiveTimeout,
    ContractError,
    HalError,
    PluginError,
    UnsupportedOp,
)
from .op import OPS, Op, Sample, T, Tol, op, require
from .registry import names
from .rng import Rng, dropout_threshold

__version__ = "0.1.0"

__all__ = [
    "API",
    "OPS",
    "Backend",
    "BackendNotFound",
    "BackendUnavailable",
    "CollectiveTimeout",
    "Comm",
    "ContractError",
    "HalError",
    "Impl",
    "Op",
    "PluginError",
    "Probe",
    "Rng",
    "Sample",
    "Solo",
    "T",
    "Tol",
    "UnsupportedOp",
    "Why",
    "activate",
    "activated",
    "backend",
    "device",
    "dropout_threshold",
    "fallbacks",
    "names",
    "op",
    "policy",
    "require",
    "use",
    "why",
]
