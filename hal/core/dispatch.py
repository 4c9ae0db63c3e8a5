"""Selects the implementation that a call runs on.

Order: a pin > the active backend's order (of registration, or of its `preference`) > the reference (only with
fallback="reference") > `UnsupportedOp` with every reason. Only declared refusals (`why_not`) move on to the next
candidate; an exception inside a kernel propagates. Every use of the reference as a fallback is warned about once,
counted, and printed at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import (
    BackendNotFound,
    BackendUnavailable,
    ContractError,
    DeviceError,
    HalError,
    PluginError,
    UnsupportedOp,
)
from . import issued, registry
from .adapters import accept
from .backend import COMPOSITION, Backend, Impl
from .call import Call
from .op import OPS, Op, install_dispatcher
from .signature import define, fragments

FALLBACKS = ("error", "reference")


@dataclass
class _Active:
    """The backend in use, the policy, and the candidates of each op under that policy."""

    backend: Backend
    fallback: str
    pins: dict[str, str]
    synchronous: bool
    around: Callable[[Impl, Callable[..., Any]], Callable[..., Any]] | None = None


_active: _Active | None = None
_fallback_counts: Counter[str] = Counter()


def use(
    name: str,
    *,
    fallback: str = "error",
    pin: Mapping[str, str] | None = None,
    synchronous: bool | None = None,
    deterministic: bool = False,
    **options: Any,
) -> Backend:
    """Makes `name` the active backend of this process, as `--backend` does. Child processes inherit the name.

    fallback: for a call that no implementation accepts: "error" (raise UnsupportedOp) or "reference" (run the op's
        reference).
    pin: op name -> implementation id, the only one allowed for that op ("reference" is allowed).
    synchronous: waits for the device after every call of an op, forward and backward, so that an error of the device is
        raised as a DeviceError that names the call; for debugging. Default: whether HAL_SYNCHRONOUS is 1.
    deterministic: the same calls in the same order give the same bits: implementations for which this does not hold
        refuse, and so does a backend that cannot (BackendUnavailable).
    options: passed to the backend's constructor, e.g. simulate=True.

    Raises BackendNotFound, PluginError, BackendUnavailable, or HalError for an unknown option or pin.
    """
    backend = registry.make(name, options, deterministic=deterministic)
    probe = registry.probed(backend)
    if not probe.ok:
        raise BackendUnavailable(
            f"backend '{name}' cannot run here: {probe.reason}. `hal doctor` shows what would help."
        )
    backend.build()
    device = backend.device(0)
    if not isinstance(device, torch.device):
        raise PluginError(f"device(0) of backend '{name}' returned {device!r}; it must return a torch.device")
    activate(backend, fallback=fallback, pin=pin, synchronous=synchronous)
    os.environ["HAL_BACKEND"] = name
    return backend


def activate(
    backend: Backend,
    *,
    fallback: str = "error",
    pin: Mapping[str, str] | None = None,
    synchronous: bool | None = None,
) -> Backend:
    """Makes an instance the active backend without looking it up by name (for tests and recorders)."""
    if synchronous is None:
        synchronous = os.environ.get("HAL_SYNCHRONOUS") == "1"
    _set(_with_policy(backend, fallback, dict(pin or {}), synchronous))
    return backend


def _set(active: _Active | None) -> None:
    """Switches to another backend or policy; every op has to look up its candidates again."""
    global _active
    _active = active
    # An error of the new backend cannot come from calls that were issued on the previous one.
    issued.forget()
    issued.after = None
    if active is not None and active.synchronous:
        issued.after = issued.synchronising(active.backend.synchronize)
    elif active is not None and active.backend.capabilities().asynchronous:
        issued.after = issued.note
    for op in OPS.values():
        op.forget()


def _with_policy(backend: Backend, fallback: str, pins: dict[str, str], synchronous: bool) -> _Active:
    if fallback not in FALLBACKS:
        raise HalError(f"unknown fallback policy {fallback!r}; choose one of {', '.join(FALLBACKS)}")
    for op_name, id in pins.items():
        if op_name not in OPS:
            raise HalError(f"pin {op_name}={id}: no op is called '{op_name}'; ops: {', '.join(OPS)}")
        ids = [i.id for i in backend.implementations(OPS[op_name])] + ["reference"]
        if id not in ids:
            raise HalError(f"pin {op_name}={id}: backend '{backend.name}' has {', '.join(ids)} for this op")
    return _Active(backend, fallback, pins, synchronous)


def _run(impl: Impl, active: _Active) -> Callable[..., Any]:
    """The function that runs a call on `impl`."""
    call = impl.call if issued.after is None else impl.noted
    # A composition is not wrapped, because the ops that it calls are.
    return call if active.around is None or impl.composed else active.around(impl, call)


def _candidates(op: Op[Any, Any], active: _Active) -> tuple[Impl, ...]:
    """The implementations that may run the op, in order of preference; a pinned op has one."""
    pin = active.pins.get(op.name)
    if pin == "reference":
        return (Impl(op, "reference", op.reference, accept, op.reference, None, {}, by_metadata=True),)
    impls = active.backend.implementations(op)
    if active.fallback == "reference":
        # The parts that the backend lacks run their references, and the others their implementations.
        impls = [dataclasses.replace(i, why_not=accept) if i.composed else i for i in impls]
    return tuple(i for i in impls if pin is None or i.id == pin)


def _in_order(op: Op[Any, Any], call: Call, active: _Active) -> list[Impl]:
    """The candidates in the order of preference for `call`."""
    preference = active.backend.preference(op)
    return _sorted(_candidates(op, active), () if preference is None else preference(call))


def _sorted(impls: Sequence[Impl], ids: tuple[str, ...]) -> list[Impl]:
    """The implementations in the order of `ids`, and after them those that are not listed there, in their order."""
    rank = {id: i for i, id in enumerate(ids)}
    return sorted(impls, key=lambda impl: rank.get(impl.id, len(ids)))


def _state() -> _Active:
    """The active backend and policy; on the first call without one, those of HAL_BACKEND."""
    if _active is None:
        name = os.environ.get("HAL_BACKEND")
        if not name:
            raise BackendNotFound(
                f"no backend was chosen; call hal.use(name), pass --backend, or set HAL_BACKEND. "
                f"Available: {', '.join(registry.backend_names())}"
            )
        use(name)
        assert _active is not None
    return _active


def backend() -> Backend:
    """The active backend (from `hal.use`, or HAL_BACKEND). Raises BackendNotFound if none was chosen."""
    return _state().backend


def chosen_backend() -> Backend | None:
    """The active backend, or None if none was chosen yet."""
    return None if _active is None else _active.backend


def runs_reference(op: Op[Any, Any]) -> bool:
    """Whether a pin makes every call of the op run its reference."""
    return _state().pins.get(op.name) == "reference"


def candidates(op: Op[Any, Any]) -> tuple[Impl, ...]:
    """The implementations that may run the op under the active backend and policy, in order of preference."""
    return _candidates(op, _state())


def device(index: int = 0) -> torch.device:
    """The torch.device number `index` of the active backend."""
    return _state().backend.device(index)


def local_device() -> torch.device:
    """The device of this process, selected by the launcher's local rank among the devices of the node."""
    return device(backend().local_index())


def synchronize() -> None:
    """Returns when all work submitted to the active backend has completed. Raises DeviceError if some of it failed."""
    with device_errors():
        backend().synchronize()


@contextlib.contextmanager
def device_errors() -> Iterator[None]:
    """Raises DeviceError, with the calls issued before, for an error of torch at a synchronising point inside.

    For statements that wait for the device, such as `loss.item()`: they raise the errors of earlier calls. Without an
    error, the calls issued so far have completed.
    """
    try:
        yield
        issued.forget()
    except RuntimeError as error:
        if isinstance(error, HalError) or issued.after is None:
            raise
        explained = backend().device_failure(error)
        if explained is not None:
            raise explained from error
        calls = issued.calls()
        listed = ", ".join(calls[-20:])
        raise DeviceError(
            f"backend '{backend().name}' reported at a synchronising point: {error}\nThe failed call is one of the "
            f"{len(calls)} issued since the device was last synchronised; the latest: {listed}. With HAL_SYNCHRONOUS=1 "
            "every call waits for the device, and the one that failed is named.",
            calls,
        ) from error


@contextlib.contextmanager
def policy(*, fallback: str | None = None, pin: Mapping[str, str] | None = None) -> Iterator[None]:
    """Changes fallback policy and adds pins for the duration of a `with` block.

    >>> with hal.policy(fallback="reference", pin={"layer_norm": "reference"}): ...     # doctest: +SKIP
    """
    before = _state()
    new_fallback = before.fallback if fallback is None else fallback
    changed = _with_policy(before.backend, new_fallback, {**before.pins, **(pin or {})}, before.synchronous)
    _set(dataclasses.replace(changed, around=before.around))
    try:
        yield
    finally:
        _set(before)


@contextlib.contextmanager
def wrapped_calls(around: Callable[[Impl, Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Runs `around(impl, call)` in place of `call`, the function that runs a call on `impl`, within a `with` block.

    For observing what a program calls; `call` and its replacement have the op's signature. References that run as a
    fallback are not wrapped. For a composition, the ops that it calls are wrapped instead.
    """
    before = _state()
    _set(dataclasses.replace(before, around=around))
    try:
        yield
    finally:
        _set(before)


@contextlib.contextmanager
def activated(
    instance: Backend,
    *,
    fallback: str = "error",
    pin: Mapping[str, str] | None = None,
    synchronous: bool | None = None,
) -> Iterator[Backend]:
    """`activate` for the duration of a `with` block."""
    before = _active
    try:
        yield activate(instance, fallback=fallback, pin=pin, synchronous=synchronous)
    finally:
        _set(before)


class _ActiveDispatcher:
    """Resolves calls according to the active backend and policy; implements `hal.core.op.Dispatcher`."""

    def admit(self, op: Op[Any, Any], call: Call) -> None:
        active = _state().backend
        expected = active.device().type
        for name in op.schema.parameters:
            value = getattr(call, name)
            tensors = value if isinstance(value, (list, tuple)) else (value,)
            for device in dict.fromkeys(t.device for t in tensors if isinstance(t, torch.Tensor)):
                if device.type != expected:
                    raise ContractError(
                        f"{op.name}: {name} is on {device}, but the active backend '{active.name}' works on "
                        f"{expected}; make it with device=hal.device(), or move it there"
                    )

    def by_metadata(self, op: Op[Any, Any], call: Call) -> Callable[..., Any] | None:
        active = _state()
        for impl in _in_order(op, call, active):
            # If the why_not of a preferred implementation depends on more than metadata, it must run on every call, so
            # the choice of a later implementation cannot be cached either.
            if not impl.by_metadata:
                return None
            if not impl.refusals(call):
                return _run(impl, active)
        return None

    def candidates(self, op: Op[Any, Any]) -> Callable[..., Any]:
        active, f = _state(), fragments(op.signature)
        preference = active.backend.preference(op)
        orders: dict[tuple[str, ...], Any] = {}

        def ordered(ids: tuple[str, ...]) -> Any:
            known = orders.get(ids)
            if known is None:
                known = orders[ids] = tuple((i.why_not, _run(i, active)) for i in _sorted(_candidates(op, active), ids))
            return known

        # Generated, because binding *args and **kwargs to a signature would take longer than all of dispatch may.
        source = (
            f"def ask({f.header}):\n"
            f"    _call = _Call({f.passed})\n"
            f"    for _why_not, _run in {'_candidates' if preference is None else '_ordered(_preference(_call))'}:\n"
            f"        if not _why_not(_call):\n"
            f"            return _run({f.passed})\n"
            f"    return _refused({f.passed})\n"
        )
        scope = {
            "_Call": op.Call,
            "_candidates": ordered(()),
            "_ordered": ordered,
            "_preference": preference,
            "_refused": lambda *args, **kwargs: _refused(op, active, args, kwargs),
            **f.scope,
        }
        return define("ask", source, scope, f"candidates of {op.name}")


install_dispatcher(_ActiveDispatcher())


def _refused(op: Op[Any, Any], active: _Active, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handles a call that no candidate accepts: runs the reference or raises, depending on the policy."""
    # The reasons are collected again here, so that no texts are kept for accepted calls.
    report = why(op, *args, **kwargs)
    if active.fallback != "reference":
        raise UnsupportedOp(f"{report}\nWhat to do: change the call, or allow the slow path with fallback='reference'.")
    if not _fallback_counts[op.name]:
        warnings.warn(f"HAL fallback: {op.name} runs its reference. {report}", RuntimeWarning, stacklevel=3)
    _fallback_counts[op.name] += 1
    return op.reference(*args, **kwargs)


@dataclass(frozen=True)
class Why:
    """The implementation of a call and its alternatives. `chosen` is an id, "reference" (fallback), or None.

    order_source: where the order of the candidates comes from, "" if the backend declares none. parts: the ops that a
    composite op's composition calls.
    """

    op: str
    backend: str
    chosen: str | None
    reasons: Mapping[str, tuple[str, ...]]
    fallback: str
    pin: str | None
    order_source: str = ""
    parts: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.op} on backend '{self.backend}'" + (f" (pinned to {self.pin})" if self.pin else "") + ":"]
        for id, reasons in self.reasons.items():
            mark = "chosen" if id == self.chosen else ("accepts" if not reasons else "refuses: " + "; ".join(reasons))
            name = f"composition of {', '.join(self.parts) or 'torch functions'}" if id == COMPOSITION else id
            lines.append(f"  {name}: {mark}")
        if not self.reasons:
            lines.append("  no implementation is registered")
        if self.chosen == "reference" and "reference" not in self.reasons:
            lines.append("  reference: chosen (fallback policy)")
        elif self.chosen is None:
            lines.append(f"  reference: not allowed (fallback policy '{self.fallback}')")
        if self.order_source and len(self.reasons) > 1:
            lines.append(f"  order: {self.order_source}")
        return "\n".join(lines)


def why(op: Op[Any, Any], *args: Any, **kwargs: Any) -> Why:
    """Determines the implementation that this call would run on, with every candidate's reasons. Runs nothing.

    Tensors may be on the meta device. Raises ContractError if the call is wrong on every backend.
    """
    active = _state()
    call = op.verify(*args, **kwargs)
    reasons = {i.id: i.refusals(call) for i in _in_order(op, call, active)}
    chosen = next((id for id, why_not in reasons.items() if not why_not), None)
    if chosen is None and active.fallback == "reference":
        chosen = "reference"
    source = active.backend.order_sources.get(op.name, "")
    parts = tuple(part.name for part in op.parts_of(call))
    return Why(op.name, active.backend.name, chosen, reasons, active.fallback, active.pins.get(op.name), source, parts)


def fallbacks() -> dict[str, int]:
    """The number of calls in this process that ran an op's reference as a fallback, by op name."""
    return dict(_fallback_counts)


@atexit.register
def _report_fallbacks() -> None:
    if _fallback_counts:
        text = ", ".join(f"{name} x{count}" for name, count in _fallback_counts.most_common())
        print(f"HAL: calls that ran the reference as a fallback: {text}", file=sys.stderr)
