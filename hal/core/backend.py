"""The base class of backends: four required methods, and one function per op.

`Backend.impl` registers an implementation of an op on the class. Where a device does not provide some information, the
defaults of the optional methods report that it is missing instead of inventing a value. Nothing here touches a device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch

from ..errors import ContractError, HalError, PluginError
from . import issued
from .adapters import lacking, optional, passing_known, refusing, require_same_signature, require_takes_call
from .autograd import make_call, noting_writes
from .call import Call
from .capabilities import Capabilities
from .op import Op
from .signature import define, fragments

if TYPE_CHECKING:
    from ..comm.contract import Comm
    from .device_spec import DeviceSpec

F = TypeVar("F", bound=Callable[..., Any])

API = 2
"""The contract's version. HAL accepts backends of this number."""


@dataclass(frozen=True)
class Probe:
    """The result of a backend's detection on this machine, which does not initialise a device.

    ok: the backend can run here. count: the number of devices. reason: one line, why it cannot run, or what was
    detected. facts: name -> value.
    """

    ok: bool
    count: int
    reason: str
    facts: Mapping[str, str] = field(default_factory=dict)


class Unavailable(str):
    """A reason of `why_not` that holds for every call on this machine: a package is not installed, or the device is not
    one that the implementation has kernels for. The conformance kit does not call such an implementation a failure."""


@dataclass(frozen=True)
class Impl:
    """One implementation of one op: `call` runs it (with autograd), `refusals` gives the reasons to refuse a call.

    by_metadata: `why_not` is marked with the function of that name. nondeterministic: why equal calls may give
    different bits, "" if they do not.
    """

    op: Op[Any, Any]
    id: str
    call: Callable[..., Any]
    why_not: Callable[[Call], Sequence[str]]
    forward: Callable[..., Any]
    bwd: Callable[..., Any] | None
    waivers: Mapping[torch.dtype, tuple[float, str]]
    by_metadata: bool = False
    nondeterministic: str = ""

    @property
    def composed(self) -> bool:
        """Whether this is the composition of a composite op, which calls other ops of the backend."""
        return self.id == COMPOSITION

    @functools.cached_property
    def noted(self) -> Callable[..., Any]:
        """`call`, after which `issued.after` is called with the name of the op and of the implementation."""
        if self.composed:  # the ops that it calls are recorded instead
            return self.call
        f = fragments(self.op.signature)
        source = (
            f"def call({f.header}):\n    _result = _call({f.passed})\n    _issued.after(_name)\n    return _result\n"
        )
        scope = {"_call": self.call, "_issued": issued, "_name": f"{self.op.name} ({self.id})", **f.scope}
        return define("call", source, scope, f"{self.id} for {self.op.name}")

    def refusals(self, call: Call) -> tuple[str, ...]:
        """The reasons of `why_not`. Raises PluginError if it returns anything but a sequence of them."""
        reasons = self.why_not(call)
        if isinstance(reasons, str) or not isinstance(reasons, Sequence):
            kind = type(reasons).__name__
            raise PluginError(
                f"why_not of '{self.id}' returned {kind}; it must return a sequence of reasons, () for none"
            )
        return tuple(reasons)


COMPOSITION = "composition"
"""The id of the implementation that runs a composite op's `decompose`."""


def address(t: torch.Tensor | None) -> int:
    """The address of a tensor's data, for kernels that take pointers; 0 for None and for a tensor without elements.

    Raises ContractError for a tensor without its own storage, for which data_ptr() returns 0: a kernel that reads there
    would crash the process. `t.data_ptr() or address(t)` is equivalent and faster.
    """
    if t is None:
        return 0
    pointer = t.data_ptr()
    if pointer == 0 and t.numel() > 0:
        raise ContractError(
            f"a {type(t).__name__} of shape {tuple(t.shape)} has no memory that a kernel could read or write: it wraps "
            "other tensors (DTensor's to_local() gives them), only describes one, or its storage was freed"
        )
    return pointer


def by_metadata(why_not: F) -> F:
    """Marks a why_not whose result depends only on shapes, dtypes, plain values, which tensors are in host memory, on
    an Rng's full_shape and start, and on a Comm's size: not on strides, addresses, requires_grad or a device's index.
    It is then called once for all calls that agree in those. The kit fails a marked why_not whose result changes with
    strides, or with an Rng's seed and offset.

    >>> @by_metadata
    ... def why_not(call):
    ...     return () if call.x.dtype is torch.float32 else (f"dtype {call.x.dtype}",)
    """
    why_not.by_metadata = True  # type: ignore[attr-defined]
    return why_not


class Backend(ABC):
    """Base class of every backend. Subclass it, set `name`, write the four methods, register implementations.

    `hal.use(name, **options)` makes an instance with `**options` and calls `probe`, then `build`.
    """

    name: ClassVar[str]
    api: ClassVar[int] = API
    simulated: bool = False
    """True while the backend runs on a simulator instead of its device; reports show it."""
    deterministic: bool = False
    """Whether implementations marked `nondeterministic` refuse every call; a backend with such implementations has a
    constructor option of this name, which `hal.use(name, deterministic=True)` sets."""
    stand_ins: Mapping[str, str] = {}
    """On a simulator: implementation id -> what runs in place of kernels that the simulator lacks."""
    order_sources: Mapping[str, str] = {}
    """Op name -> where the order of its implementations comes from (what it was measured on); `hal why` prints it."""
    device_specs: ClassVar[Sequence[DeviceSpec]] = ()
    """Kinds of device that `hal plan` can plan for; the first is its default."""
    impls: ClassVar[dict[str, list[Impl]]]
    """Implementations by op name, in order of preference (= order of registration)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A subclass starts from its parent's implementations, so that a wrapper (such as a recorder) can add to them.
        cls.impls = {name: list(impls) for name, impls in getattr(cls, "impls", {}).items()}

    # Required methods.

    @abstractmethod
    def probe(self) -> Probe:
        """Detects what is available on this machine. Must not raise, initialise the device or compile anything."""

    @abstractmethod
    def device(self, index: int = 0) -> torch.device:
        """The torch.device of device number `index`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when all work submitted so far has completed."""

    @abstractmethod
    def comm(self, ranks: Sequence[int] | None = None, *, timeout: float = 600.0) -> Comm:
        """A communicator over the global `ranks` (None = all), with a timeout in seconds on every collective."""

    def local_index(self) -> int:
        """The index of this process's device: entry LOCAL_RANK of the launcher's list HAL_DEVICES, else LOCAL_RANK.

        With a single visible device the index is 0, because a launcher may expose only its own device to each process.
        """
        rank, listed = int(os.environ.get("LOCAL_RANK", "0")), os.environ.get("HAL_DEVICES")
        count = self.probe().count
        if count == 1:
            return 0
        indices = dict(enumerate((listed or "").split(",")))
        if listed and not indices.get(rank, "").strip().isdecimal():
            raise HalError(
                f"HAL_DEVICES is {listed!r}; process {rank} of this machine needs a number at position {rank}"
            )
        index = int(indices[rank]) if listed else rank
        if count > 1 and index >= count:
            raise HalError(f"process {rank} of this machine needs device {index}, but {self.name} has {count}")
        return index

    def implementations(self, op: Op[Any, Any]) -> list[Impl]:
        """The implementations of `op` in order of preference; of a composite op, its composition is the last."""
        own = [self._in_mode(impl) for impl in self.impls.get(op.name, [])]
        if op.decompose is None:
            return own
        missing = [part for part in op.parts if not self.implementations(part)]
        stored, tensors = (
            self.capabilities().dtypes,
            [p.name for p in op.schema.parameters.values() if p.kind == "tensor"],
        )

        def why_not(call: Call) -> Sequence[str]:
            given = {t.dtype: None for t in (getattr(call, name) for name in tensors) if t is not None}
            return (
                *(f"{part.name} has no implementation" for part in op.parts_of(call) if part in missing),
                *(f"the device stores no {dtype} (capability dtypes)" for dtype in given if dtype not in stored),
            )

        return [*own, Impl(op, COMPOSITION, op.decompose, why_not, op.decompose, None, {}, True)]

    def preference(self, op: Op[Any, Any]) -> Callable[[Call], tuple[str, ...]] | None:
        """For an op whose best implementation depends on the call: a function from a call to the ids of its
        implementations, best first. It must be pure and cheap, and may read only metadata. Ids that it leaves out
        follow in the order of registration. None, the default: the order of registration for all calls."""
        return None

    def _in_mode(self, impl: Impl) -> Impl:
        """The implementation, which in deterministic mode refuses every call if it is nondeterministic."""
        if not (self.deterministic and impl.nondeterministic):
            return impl
        reason = f"deterministic mode ({impl.nondeterministic})"
        return dataclasses.replace(impl, why_not=lambda call: (reason,), by_metadata=True)

    # Optional methods.

    def build(self) -> None:
        """Compiles or loads kernels. Called by `hal.use`; raises BackendUnavailable if that fails."""

    def capabilities(self) -> Capabilities:
        """What the devices can do, apart from ops. Must not initialise a device."""
        return Capabilities()

    def device_failure(self, error: RuntimeError) -> HalError | None:
        """The HalError that `error`, raised where the host waits for the device, stands for; None: DeviceError.

        For backends whose communicators order their waits on the device: see `hal.collective_failure`.
        """
        return None

    def memory_stats(self) -> Mapping[str, int]:
        """Bytes by name ("allocated", "peak", ...); empty where the device keeps no statistics."""
        return {}

    def reset_peak_memory(self) -> None:
        """Resets the "peak" of `memory_stats`, if there is one."""

    def stream(self) -> contextlib.AbstractContextManager[object]:
        """A context whose work runs on a separate stream, after the work submitted before it; work submitted after
        the context runs after it. By default the current stream.
        """
        return contextlib.nullcontext()

    def event(self) -> object:
        """Marks the work submitted to the current stream so far, for `wait`. By default waits for it on the host."""
        self.synchronize()
        return None

    def wait(self, event: object) -> None:
        """Orders the current stream's later work after the work that `event` marks, which any stream may have run."""

    def capture(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """Runs `function`, recording its work on the device, and returns a function that repeats the recorded work.

        Inputs and outputs keep their addresses: write new inputs into the old tensors; the results are written into the
        tensors that `function` has returned, which each repetition returns again. Only with the capability `graphs`.
        """
        raise HalError(f"backend '{self.name}' cannot record graphs (Backend.capabilities().graphs is False)")

    def memory_pool(self) -> contextlib.AbstractContextManager[object]:
        """A context whose allocations come from a separate pool, which is returned to the device once they are freed.

        Only with the capability `memory_pools`.
        """
        raise HalError(f"backend '{self.name}' has no memory pools (Backend.capabilities().memory_pools is False)")

    @contextlib.contextmanager
    def profile_range(self, name: str) -> Iterator[None]:
        """Names a range in the device's profiler; by default in torch's."""
        with torch.profiler.record_function(name):
            yield

    @contextlib.contextmanager
    def profiler(self, folder: str, name: str) -> Iterator[None]:
        """Records what the host and the device do, and writes a file or a folder in `folder` that begins with `name`.

        By default torch's profiler with all activities that it supports here, and its Chrome trace in
        `name`.torch.json.gz.
        """
        activities = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]
        with torch.profiler.profile(activities=activities) as profiler:
            yield
        profiler.export_chrome_trace(os.path.join(folder, f"{name}.torch.json.gz"))

    @classmethod
    def impl(
        cls,
        op: Op[Any, Any],
        *,
        id: str,
        why_not: Callable[[Call], Sequence[str]] | None = None,
        bwd: Callable[..., Any] | None = None,
        waivers: Mapping[torch.dtype, tuple[float, str]] | None = None,
        version: int = 1,
        nondeterministic: str = "",
    ) -> Callable[[F], F]:
        """Registers the decorated function as an implementation of `op`; the first registered is preferred.

        The function has the reference's signature. It may lack parameters that have a default: calls that give them
        another value are refused with that reason, except for `op.hints`, which are not passed to it. Without `bwd` it
        returns what the reference returns and, if the op has gradients, is differentiable by torch. With `bwd` it
        returns `(output, residuals)`; `bwd(residuals, *output_grads)` returns one gradient (or None) for each name in
        `op.grads` that the function takes, in that order. Residuals are a tuple of tensors and plain values. Forward
        and backward are always selected together. A bwd with a keyword parameter `needs` gets a tuple of bools, one per
        gradient. It may return None for gradients whose entry is False, because they are discarded.

        why_not(call): returns the reasons for refusing a `Call`, empty to accept it. Must be pure and cheap; may be
            given meta tensors and must not touch a device. Runs on every call unless marked with `by_metadata`. A
            reason for which every call is refused on this machine is an `Unavailable`.
        waivers: dtype -> (factor, reason): the op's tolerance is multiplied by factor for this implementation, and
            every report prints the reason.
        version: the op's version for which the implementation was written. If the op has another one, every call is
            refused with that reason, and nothing else is checked.
        nondeterministic: why equal calls may give different bits, which the backend's deterministic mode refuses.

        Raises HalError for a signature that differs from the reference, or an id used twice.
        """

        def decorate(function: F) -> F:
            where = f"implementation '{id}'"
            registered = cls.impls.setdefault(op.name, [])
            if any(i.id == id for i in registered) or id in ("reference", COMPOSITION):
                raise HalError(f"{where} of op '{op.name}' is registered twice or reserved; ids are unique per op")
            op.forget()
            if version != op.version:
                text = f"written for version {version} of {op.name}, which has version {op.version}"
                refuse = by_metadata(lambda call: (text,))
                registered.append(Impl(op, id, function, refuse, function, bwd, dict(waivers or {}), True))
                return function
            require_same_signature(op, function, where, optional(op))
            absent = lacking(op, function)
            if why_not is not None:
                require_takes_call(why_not, f"why_not of {where}")
            forward, refusals = passing_known(op, function), refusing(op, why_not, absent)
            if bwd is not None and not op.grads:
                raise HalError(f"{where}: op '{op.name}' has no gradients, so it takes no bwd")
            grads = [name for name in op.grads if name not in absent]
            call = forward if bwd is None else make_call(op, forward, bwd, id, grads)
            if op.mutates:
                call = noting_writes(op, call, id)
            marked = why_not is None or getattr(why_not, "by_metadata", False)
            registered.append(Impl(op, id, call, refusals, forward, bwd, dict(waivers or {}), marked, nondeterministic))
            return function

        return decorate

    def options(self) -> Mapping[str, Any]:
        """The constructor's parameters and the values in force, for reports."""
        return {n: getattr(self, n, None) for n in inspect.signature(type(self)).parameters}
