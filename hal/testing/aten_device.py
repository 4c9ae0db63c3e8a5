"""A device made of Python, on which only HAL's ops and listed operations of torch (aten) exist; it records the latter.

Its tensors report the device `meta:0` and hold their values in a CPU tensor; those of `meta`, without an index, are
torch's own, which have no values and are not of this device. HAL's ops run their references on these, as
opaque kernels, so that every aten operation that reaches the device is one that HAL, the model or autograd calls
itself. Operations on host tensors are not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_iter, tree_map

from hal.comm.contract import Comm, Message, SingleRankComm, Work
from hal.core.adapters import accept
from hal.core.autograd import make_call, noting_writes
from hal.core.backend import Backend, Impl, Probe
from hal.core.capabilities import Capabilities
from hal.core.op import OPS, Op
from hal.errors import HalError

DEVICE, HOST = torch.device("meta", 0), torch.device("cpu")

_MIXING = ("_to_copy", "copy_", "index", "index_put_", "_index_put_impl_")
"""Operations in which a device's tensor may meet a tensor of the host that is not a scalar."""


class DeviceTensor(torch.Tensor):
    """A tensor on the device; `on_host` holds its values."""

    on_host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor) -> DeviceTensor:
        result: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
            requires_grad=False,
        )
        result.on_host = values
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.on_host!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise HalError(f"{func} on a tensor of the recording device outside of an AtenRecorder")


def unwrap(value: Any) -> Any:
    """The counterpart on the host of a tensor, a communicator or the device itself; other values unchanged."""
    if isinstance(value, DeviceTensor):
        return value.on_host
    if isinstance(value, DeviceComm):
        return value.inner
    return HOST if isinstance(value, torch.device) else value


def wrap(value: Any) -> Any:
    """A tensor's counterpart on the device; other values unchanged."""
    return DeviceTensor(value) if isinstance(value, Tensor) else value


class AtenRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs the device's operations, and calls `note(operation, args, kwargs)` for each that touches the device."""

    def __init__(self, note: Callable[[Any, Sequence[Any], dict[str, Any]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        reads = any(isinstance(x, DeviceTensor) for x in tensors)
        target = kwargs.get("device")
        creates = target is not None and torch.device(target) == DEVICE
        if not (reads or creates):
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name not in _MIXING and any(x.ndim and not isinstance(x, DeviceTensor) for x in tensors):
            raise HalError(f"{func} mixes tensors of the device and of the host")
        self.note(func, args, kwargs)
        out = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
        if target is not None and not creates:
            return out
        if name == "copy_" and not isinstance(args[0], DeviceTensor):
            return args[0]
        return return_and_correct_aliasing(func, args, kwargs, tree_map(wrap, out))  # type: ignore[no-untyped-call]


class DeviceComm(Comm):
    """A communicator of the device, whose transport is one of the host."""

    def __init__(self, inner: Comm) -> None:
        self.inner, self.name, self.rank, self.size, self.device = inner, inner.name, inner.rank, inner.size, DEVICE

    def _start(self, collective: str, x: Tensor, op: str, source: int) -> Work:
        return self.inner.start(collective, unwrap(x), op=op, source=source).then(wrap)

    def _exchange_start(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], list[Tensor]]:
        inner = [[Message(m.peer, unwrap(m.tensor)) for m in messages] for messages in (sends, receives)]
        finish = self.inner.exchange_start(*inner)
        return lambda: [wrap(x) for x in finish()]


class RecordingBackend(Backend):
    """The recording device as a backend. A thread that is a rank of a world gives its communicator to `join`."""

    name = "recording"

    def __init__(self) -> None:
        self.impls = {op.name: [_implementation(op)] for op in OPS.values()}  # type: ignore[misc]
        self._local = threading.local()

    def join(self, world: Comm) -> None:
        """This thread is a rank of `world`."""
        self._local.world = DeviceComm(world)

    def probe(self) -> Probe:
        return Probe(True, 1, "a device made of Python")

    def capabilities(self) -> Capabilities:
        reals = super().capabilities()
        return replace(reals, dtypes=reals.dtypes | {torch.float8_e4m3fn, torch.float8_e5m2})

    def device(self, index: int = 0) -> torch.device:
        return DEVICE

    def local_index(self) -> int:
        return 0

    def synchronize(self) -> None:
        return None

    def comm(self, ranks: Sequence[int] | None = None, *, timeout: float = 600.0) -> Comm:
        world: Comm = getattr(self._local, "world", None) or DeviceComm(SingleRankComm("world"))
        if ranks is not None and len(ranks) != world.size:
            raise HalError(f"the recording device has no group of the ranks {list(ranks)}, only the whole world")
        return world


def _implementation(op: Op[Any, Any]) -> Impl:
    """The op's reference as an opaque kernel of the device."""

    def plain(*args: Any, **kwargs: Any) -> Any:
        return tree_map(wrap, op.reference(*tree_map(unwrap, args), **tree_map(unwrap, kwargs)))

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = op.signature.bind(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
        for name in op.grads:
            if call.arguments.get(name) is not None:
                call.arguments[name] = call.arguments[name].detach().requires_grad_()
        with torch.enable_grad():
            out = op.reference(*call.args, **call.kwargs)
        leaves = [call.arguments.get(name) for name in op.grads]
        detached = tree_map(lambda x: wrap(x.detach()) if isinstance(x, Tensor) else x, out)
        return detached, (_Graph(out if isinstance(out, tuple) else (out,), leaves),)

    def bwd(residuals: tuple[Any, ...], *output_grads: Any) -> tuple[Any, ...]:
        (graph,) = residuals
        pairs = [(y, unwrap(dy)) for y, dy in zip(graph.outputs, output_grads) if dy is not None and y.requires_grad]
        present = [leaf for leaf in graph.leaves if leaf is not None]
        grads = iter(torch.autograd.grad([y for y, _ in pairs], present, [dy for _, dy in pairs], allow_unused=True))
        return tuple(None if leaf is None else wrap(next(grads)) for leaf in graph.leaves)

    call = make_call(op, forward, bwd, "recording") if op.grads else plain
    if op.mutates:
        call = noting_writes(op, call, "recording")
    return Impl(op, "recording", call, accept, plain, None, {})


class _Graph:
    """What a backward pass of a reference needs: its outputs and differentiable inputs, on the host."""

    def __init__(self, outputs: tuple[Any, ...], leaves: list[Any]) -> None:
        self.outputs, self.leaves = outputs, leaves
