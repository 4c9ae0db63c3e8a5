"""The public names of `hal`, from the modules that define them. Importing this module imports torch, and no vendor
package, no op and no model."""

from .comm.contract import Comm, Message, SingleRankComm, Work
from .comm.torch import GLOO, TorchComm, Transport, collective_failure, engine_failure, torch_comm
from .core import transforms as _transforms  # noqa: F401  routes calls that are traced or transformed
from .core.backend import API, Backend, Impl, Probe, Unavailable, address, by_metadata
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
from .core.host_values import to_device
from .core.lower import Lowered, lower
from .core.op import OPS, Choice, DtypeSpec, Op, Sample, TensorSpec, Tol, op, require
from .core.registry import backend_names
from .core.tensor_rng import TensorRng
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
    "TensorRng",
    "TensorSpec",
    "Tol",
    "TorchComm",
    "Transport",
    "Unavailable",
    "UnsupportedOp",
    "Why",
    "Work",
    "activate",
    "activated",
    "address",
    "backend",
    "backend_names",
    "by_metadata",
    "collective_failure",
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
    "to_device",
    "torch_comm",
    "use",
    "why",
]
