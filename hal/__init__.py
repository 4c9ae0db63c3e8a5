"""HAL: one GPT, any accelerator.

`hal.use("cpu_ref")` chooses the backend; `hal.ops` holds the operations; a third party adds hardware by subclassing
`hal.Backend`. Importing hal imports torch and nothing else: no vendor package, no op, no model.
"""

from . import autoload  # noqa: F401  before anything that imports torch
from .accelerator import Accelerator
from .backend import API, Backend, Impl, Probe, address, by_metadata
from .comm import Comm, Message, Pending, Solo
from .comm_torch import GLOO, TorchComm, Transport, engine_failure, torch_comm
from .dispatch import Why, activate, activated, backend, device, fallbacks, policy, use, why
from .errors import (
    BackendNotFound,
    BackendUnavailable,
    CollectiveFailed,
    CollectiveTimeout,
    ContractError,
    HalError,
    PluginError,
    UnsupportedOp,
)
from .lower import Lowered, lower
from .op import OPS, Op, Sample, T, Tol, op, require
from .registry import names
from .rng import Rng, dropout_threshold

__version__ = "0.1.0"

__all__ = [
    "API",
    "GLOO",
    "OPS",
    "Accelerator",
    "Backend",
    "BackendNotFound",
    "BackendUnavailable",
    "CollectiveFailed",
    "CollectiveTimeout",
    "Comm",
    "ContractError",
    "HalError",
    "Impl",
    "Lowered",
    "Message",
    "Op",
    "Pending",
    "PluginError",
    "Probe",
    "Rng",
    "Sample",
    "Solo",
    "T",
    "Tol",
    "TorchComm",
    "Transport",
    "UnsupportedOp",
    "Why",
    "activate",
    "activated",
    "address",
    "backend",
    "by_metadata",
    "device",
    "dropout_threshold",
    "engine_failure",
    "fallbacks",
    "lower",
    "names",
    "op",
    "policy",
    "require",
    "torch_comm",
    "use",
    "why",
]
