"""hal_device(): unmodified megatron-core on the active HAL backend.

While the `with` block runs, and never otherwise, the torch names in `CORE` (all that megatron-core's dense GPT training
and checkpointing use of an NVIDIA device) act on the active backend. Whoever has already replaced one of them is named
and nothing is touched. On an NVIDIA device nothing needs routing and nothing is routed.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import typing_extensions

import hal
from hal import HalError

from .guards import guarded
from .place import ASKED_FOR, Place

Make = Callable[[Place, Any], Any]
"""(place, torch's own object) -> what stands in its place while routed."""

CORE: Mapping[str, Make] = {
    "torch.cuda.current_device": lambda place, own: place.current,
    "torch.cuda.synchronize": lambda place, own: place.synchronize,
    "torch.cuda.get_rng_state": lambda place, own: place.get_rng_state,
    "torch.cuda.random.get_rng_state": lambda place, own: place.get_rng_state,
    "torch.cuda.set_rng_state": lambda place, own: place.set_rng_state,
    "torch.cuda.manual_seed": lambda place, own: place.manual_seed,
    "torch.cuda.default_generators": lambda place, own: place.generators,
    "torch.cuda._lazy_call": lambda place, own: lambda call, **kwargs: call(),
    "torch.tensor": lambda place, own: place.factory(own),
    "torch.zeros": lambda place, own: place.factory(own),
    "torch.ones": lambda place, own: place.factory(own),
    "torch.empty": lambda place, own: place.factory(own),
    "torch.empty_like": lambda place, own: place.factory(own),
    "torch.Tensor.cuda": lambda place, own: place.move_tensor(own),
    "torch.Tensor.type": lambda place, own: place.type_name(own),
    "torch.distributed.all_gather_into_tensor": lambda place, own: _gather_flat(own),
}
"""What megatron-core needs. Each entry is needed: tests drop them one by one."""


def _gather_flat(own: Callable[..., Any]) -> Callable[..., Any]:
    """all_gather_into_tensor, where a flat result may be gathered from tensors of any shape, as NCCL allows."""

    @functools.wraps(own)
    def gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        flat = output_tensor.ndim == 1 and input_tensor.ndim > 1
        return own(output_tensor, input_tensor.flatten() if flat else input_tensor, *args, **kwargs)

    return gather


@dataclass(frozen=True)
class _Routed:
    """One replaced name: `name` of `owner` was `before` (own: in the owner itself, not inherited) and is now `now`."""

    owner: Any
    name: str
    before: Any
    own: bool
    now: Any

    def put(self) -> None:
        setattr(self.owner, self.name, self.now)

    def take_back(self) -> None:
        if self.own:
            setattr(self.owner, self.name, self.before)
        else:
            delattr(self.owner, self.name)


class _Session:
    """What is routed, from the first block that is entered until the last one is left."""

    def __init__(self, backend: hal.Backend) -> None:
        self.backend, self.place, self.blocks = backend, Place(backend), 0
        self.routed: dict[str, _Routed] = {}
        self.around = contextlib.ExitStack()

    def route(self, names: Mapping[str, Make]) -> None:
        """Puts what is not routed yet; all of it or, if a name is someone else's, nothing."""
        new = {name: _prepare(name, make, self.place) for name, make in names.items() if name not in self.routed}
        for name, one in new.items():
            self.routed[name] = one
            one.put()
        _rebind({id(one.before): one.now for one in new.values() if callable(one.before)})

    def guard(self) -> None:
        self.around.enter_context(guarded())
        self.around.enter_context(_quiet(self.place))

    def end(self) -> list[str]:
        """Restores everything but what others have replaced meanwhile, and names that."""
        self.around.close()
        routed = list(self.routed.values())
        lost = [f"{_spelled(one)} by {_origin(_current(one))}" for one in routed if _current(one) is not one.now]
        for one in routed:
            if _current(one) is one.now:
                one.take_back()
        _rebind({id(one.now): one.before for one in routed if callable(one.before)})
        return lost


_session: _Session | None = None
_entering = threading.RLock()


@contextlib.contextmanager
def hal_device(names: Mapping[str, Make] = CORE) -> Iterator[None]:
    """Routes `names` to the active backend (`hal.use`) for the duration of a `with` block, for the whole process.

    Blocks may nest and overlap, in one thread or in several: names that an inner block adds are routed, too, and all
    stay routed until the last block is left. On an NVIDIA device nothing is done.

    Raises HalError if a name is already someone else's, if another backend is routed, or, at the end, if someone
    replaced a name meanwhile (the others are restored).
    """
    backend = hal.backend()
    if backend.device().type == ASKED_FOR:
        yield
        return
    _enter(backend, names)
    try:
        yield
    except BaseException:
        _leave()
        raise
    lost = _leave()
    if lost:
        raise HalError(f"hal_device: replaced by others while routed, and left as they are: {', '.join(lost)}")


def _enter(backend: hal.Backend, names: Mapping[str, Make]) -> None:
    global _session
    with _entering:
        if _session is not None and _session.backend.name != backend.name:
            raise HalError(
                f"hal_device: the names are routed to backend '{_session.backend.name}'; leave that block before "
                f"routing them to '{backend.name}'"
            )
        session = _session or _Session(backend)
        try:
            session.route(names)
            if _session is None:
                session.guard()
            session.blocks += 1
            _session = session
        except BaseException:
            if session.blocks == 0:
                session.end()
            raise


def _leave() -> list[str]:
    global _session
    with _entering:
        assert _session is not None
        _session.blocks -= 1
        if _session.blocks:
            return []
        session, _session = _session, None
        return session.end()


def _prepare(path: str, make: Make, place: Place) -> _Routed:
    *owners, name = path.split(".")[1:]
    owner: Any = functools.reduce(getattr, owners, torch)
    before = getattr(owner, name)
    if not _is_torchs(before, owner, name):
        raise HalError(
            f"hal_device: {path} is already replaced, by {_origin(before)}. Two layers that route the device do not "
            "work together: remove the other one (an adaptor such as transfer_to_npu or MindSpeed's, or a shim)."
        )
    return _Routed(owner, name, before, name in vars(owner), make(place, before))


def _is_torchs(thing: Any, owner: Any, name: str) -> bool:
    """Whether this is what torch ships as `name` of `owner`: it bears that name, is at home there, and is written in C
    or, with all that it wraps, in torch's own files."""
    if type(thing) is tuple:  # generators: none, or those of NVIDIA devices
        return all(isinstance(one, torch.Generator) and one.device.type == ASKED_FOR for one in thing)
    if getattr(thing, "__name__", None) != name:
        return False
    if isinstance(thing, types.MethodDescriptorType):
        return isinstance(owner, type) and issubclass(owner, thing.__objclass__)
    home = owner.__module__ if isinstance(owner, type) else owner.__name__
    if not f"{getattr(thing, '__module__', '')}.".startswith(f"{home}."):
        return False
    if isinstance(thing, types.FunctionType):
        return owner is not torch and all(_in_torchs_files(one) for one in _unwrapped(thing))
    return isinstance(thing, types.BuiltinFunctionType | type)


def _unwrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _in_torchs_files(function: Any) -> bool:
    """Whether it is torch's code, or the decorator by which torch marks what is deprecated."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    file = Path(code.co_filename)
    return file.is_relative_to(Path(torch.__file__).parent) or file == Path(typing_extensions.__file__)


def _origin(thing: Any) -> str:
    foreign = [one for one in _unwrapped(thing) if hasattr(one, "__code__") and not _in_torchs_files(one)]
    code = getattr((foreign or [thing])[0], "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    name = getattr(thing, "__qualname__", None)
    return f"{getattr(thing, '__module__', None) or 'torch'}.{name}" if name else f"a {type(thing).__name__}: {thing!r}"


def _current(one: _Routed) -> Any:
    return getattr(one.owner, one.name, None)


def _spelled(one: _Routed) -> str:
    return f"{one.owner.__name__}.{one.name}"


def _rebind(exchange: Mapping[int, Any]) -> None:
    """The same exchange (id -> new object) where modules of megatron hold copies: names that were imported from torch,
    and defaults of parameters."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("megatron.")]
    for module in modules:
        if not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if id(value) in exchange:
                setattr(module, key, exchange[id(value)])
            elif isinstance(value, types.FunctionType):
                _rebind_defaults(value, exchange)
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for method in vars(value).values():
                    if isinstance(method, types.FunctionType):
                        _rebind_defaults(method, exchange)


def _rebind_defaults(function: types.FunctionType, exchange: Mapping[int, Any]) -> None:
    if any(id(value) in exchange for value in function.__defaults__ or ()):
        function.__defaults__ = tuple(exchange.get(id(value), value) for value in function.__defaults__ or ())


@contextlib.contextmanager
def _quiet(place: Place) -> Iterator[None]:
    """On the host, drops the RNG tracker's warning that the host's generator moved: there it is the device's, too."""
    logger = logging.getLogger("megatron.core.tensor_parallel.random")

    def other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("CPU RNG state changed")

    if place.host:
        logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)
