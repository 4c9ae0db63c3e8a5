"""HAL: one GPT, any accelerator.

`hal.use("cpu_ref")` chooses the backend; `hal.ops` holds the operations; a third party adds hardware by subclassing
`hal.Backend`. Importing hal imports torch and nothing else: no vendor package, no op, no model.
"""

from . import autoload  # noqa: F401  before anything that imports torch
from .comm.contract import Comm, Message, SingleRankComm, Work
from .comm.torch import GLOO, TorchComm, Transport, engine_failure, torch_comm
from .core.backend import API, Backend, Impl, Probe, address, by_metadata
from .core.call import Call
from .core.capabilities import Capabilities
from .core.device_spec import DeviceSpec
from .core.dispatch import (
    Why,
    activate,
    activated,
    backend,
    device,
    device_errors,
    fallbacks,
    local_device,
    policy,
    synchronize,
    use,
    why,
)
from .core.lower import Lowered, lower
from .core.op import OPS, Choice, DtypeSpec, Op, Sample, TensorSpec, Tol, op, require
from .core.registry import backend_names
from .errors import (
    BackendNotFound,
    BackendUnavailable,
    CollectiveFailed,
    CollectiveTimeout,
    ContractError,
    DeviceError,
    HalError,
    PluginError,
    UnsupportedOp,
)
from .rng import Rng, dropout_threshold

__version__ = "0.1.0"

__all__ = [
    "API",
    "GLOO",
    "OPS",
    "Backend",
    "BackendNotFound",
    "BackendUnavailable",
    "Call",
    "Capabilities",
    "Choice",
    "CollectiveFailed",
    "CollectiveTimeout",
    "Comm",
    "ContractError",
    "DeviceError",
    "DeviceSpec",
    "DtypeSpec",
    "HalError",
    "Impl",
    "Lowered",
    "Message",
    "Op",
    "PluginError",
    "Probe",
    "Rng",
    "Sample",
    "SingleRankComm",
    "TensorSpec",
    "Tol",
    "TorchComm",
    "Transport",
    "UnsupportedOp",
    "Why",
    "Work",
    "activate",
    "activated",
    "address",
    "backend",
    "backend_names",
    "by_metadata",
    "device",
    "device_errors",
    "dropout_threshold",
    "engine_failure",
    "fallbacks",
    "local_device",
    "lower",
    "op",
    "policy",
    "require",
    "synchronize",
    "torch_comm",
    "use",
    "why",
]
