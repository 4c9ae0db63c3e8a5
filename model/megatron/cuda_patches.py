"""hal_device(): patches torch so that unmodified megatron-core runs on the active HAL backend.

Only while the `with` block runs, the torch names in `CORE` (those of an NVIDIA device in megatron-core's GPT training
and checkpointing) and in `device_patches.DEVICE` (all others by which programs refer to that device) act on the active
backend. If other code has already replaced one of them, the error names the replacement and nothing is patched. On an
NVIDIA device nothing is patched.
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

from .device_patches import DEVICE, Make
from .device_proxy import DEVICE_TYPE, DeviceProxy
from .guards import guarded

CORE: Mapping[str, Make] = {
    "torch.cuda.current_device": lambda proxy, own: proxy.current,
    "torch.cuda.synchronize": lambda proxy, own: proxy.synchronize,
    "torch.cuda.get_rng_state": lambda proxy, own: proxy.get_rng_state,
    "torch.cuda.random.get_rng_state": lambda proxy, own: proxy.get_rng_state,
    "torch.cuda.set_rng_state": lambda proxy, own: proxy.set_rng_state,
    "torch.cuda.manual_seed": lambda proxy, own: proxy.manual_seed,
    "torch.cuda.default_generators": lambda proxy, own: proxy.generators,
    "torch.cuda._lazy_call": lambda proxy, own: lambda call, **kwargs: call(),
    "torch.tensor": lambda proxy, own: proxy.factory(own),
    "torch.zeros": lambda proxy, own: proxy.factory(own),
    "torch.ones": lambda proxy, own: proxy.factory(own),
    "torch.empty": lambda proxy, own: proxy.factory(own),
    "torch.empty_like": lambda proxy, own: proxy.factory(own),
    "torch.Tensor.cuda": lambda proxy, own: proxy.move_tensor(own),
    "torch.Tensor.type": lambda proxy, own: proxy.type_name(own),
    "torch.distributed.all_gather_into_tensor": lambda proxy, own: _gather_flat(own),
}
"""The names that megatron-core needs. A test removes them one by one to verify that each is needed."""


def _gather_flat(own: Callable[..., Any]) -> Callable[..., Any]:
    """all_gather_into_tensor that accepts a flat output for inputs of any shape, as NCCL does."""

    @functools.wraps(own)
    def gather(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        flat = output_tensor.ndim == 1 and input_tensor.ndim > 1
        return own(output_tensor, input_tensor.flatten() if flat else input_tensor, *args, **kwargs)

    return gather


NAMES: Mapping[str, Make] = {**DEVICE, **CORE}
"""All names that `hal_device` routes."""


@dataclass(frozen=True)
class Patch:
    """The replacement of `owner.name`, originally `before`, by `now`. own: whether `before` is the owner's own
    attribute and not an inherited one."""

    owner: Any
    name: str
    before: Any
    own: bool
    now: Any

    def apply(self) -> None:
        setattr(self.owner, self.name, self.now)

    def revert(self) -> None:
        if self.own:
            setattr(self.owner, self.name, self.before)
        else:
            delattr(self.owner, self.name)


class _Session:
    """The applied patches, from entering the first `hal_device` block until leaving the last."""

    def __init__(self, backend: hal.Backend) -> None:
        self.backend, self.proxy, self.blocks = backend, DeviceProxy(backend), 0
        self.patches: dict[str, Patch] = {}
        self.guards = contextlib.ExitStack()

    def apply(self, names: Mapping[str, Make]) -> None:
        """Applies the patches that are new. If other code has replaced one of the names, applies none."""
        if not self.patches:
            _list_functions_for_compile()
        # All patches are prepared, and thereby validated, before the first one is applied.
        new = {name: _prepare(name, make, self.proxy) for name, make in names.items() if name not in self.patches}
        for name, patch in new.items():
            self.patches[name] = patch
            patch.apply()
        _rebind({id(patch.before): patch.now for patch in new.values() if callable(patch.before)})

    def guard(self) -> None:
        self.guards.enter_context(guarded())
        self.guards.enter_context(_quiet(self.proxy))

    def end(self) -> list[str]:
        """Reverts all patches except those that others have replaced meanwhile, and returns these."""
        self.guards.close()
        patches = list(self.patches.values())
        lost = [
            f"{_path(patch)} by {_origin(_current(patch))}" for patch in patches if _current(patch) is not patch.now
        ]
        for patch in patches:
            if _current(patch) is patch.now:
                patch.revert()
        _rebind({id(patch.now): patch.before for patch in patches if callable(patch.before)})
        return lost


def _list_functions_for_compile() -> None:
    """Makes torch.compile list torch's functions before any is replaced.

    It does so once per process, by identity, at its first use. If that were inside a block, the functions that are
    replaced there could not be compiled after it.
    """
    from torch._dynamo import trace_rules

    trace_rules.get_torch_obj_rule_map()


_session: _Session | None = None
_entering = threading.RLock()


@contextlib.contextmanager
def hal_device(names: Mapping[str, Make] = NAMES) -> Iterator[None]:
    """Redirects `names` to the active backend (`hal.use`), process-wide, while a `with` block runs.

    Blocks may nest and overlap, in one or several threads: an inner block may add names, and all patches stay until the
    last block ends. On an NVIDIA device nothing is done.

    Raises HalError if other code has replaced a name already, if another backend is active in an outer block, or at
    the end if other code replaced a name meanwhile (the others are reverted).
    """
    backend = hal.backend()
    if backend.device().type == DEVICE_TYPE:
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
        raise HalError(f"hal_device: replaced by others in the meantime, and not reverted: {', '.join(lost)}")


def _enter(backend: hal.Backend, names: Mapping[str, Make]) -> None:
    global _session
    with _entering:
        if _session is not None and _session.backend.name != backend.name:
            raise HalError(
                f"hal_device: already active for backend '{_session.backend.name}'; leave that block before entering "
                f"one for '{backend.name}'"
            )
        first, session = _session is None, _session or _Session(backend)
        session.blocks += 1
        try:
            session.apply(names)
            _session = session
            # Not imported earlier, because importing megatron.core makes `hal launch` enter another block.
            if first:
                session.guard()
        except BaseException:
            session.blocks -= 1
            if session.blocks == 0:
                _session = None
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


def _prepare(path: str, make: Make, proxy: DeviceProxy) -> Patch:
    *owners, name = path.split(".")[1:]
    owner: Any = functools.reduce(getattr, owners, torch)
    before = getattr(owner, name)
    if not _is_torchs(before, owner, name):
        raise HalError(
            f"hal_device: {path} is already replaced, by {_origin(before)}. Two layers that patch the device do "
            "not work together: remove the other one (an adaptor such as transfer_to_npu or MindSpeed's, or a shim)."
        )
    return Patch(owner, name, before, name in vars(owner), make(proxy, before))


def _is_torchs(thing: Any, owner: Any, name: str) -> bool:
    """Whether this is torch's original `owner.name`: it has that name and that module, and it is implemented in C or,
    including all functions that it wraps, in torch's own files."""
    if type(thing) is tuple:  # default_generators: empty, or one per NVIDIA device
        return all(isinstance(g, torch.Generator) and g.device.type == DEVICE_TYPE for g in thing)
    if getattr(thing, "__name__", None) != name:
        return False
    if isinstance(thing, types.MethodDescriptorType):
        return isinstance(owner, type) and issubclass(owner, thing.__objclass__)
    home = owner.__module__ if isinstance(owner, type) else owner.__name__
    if not f"{getattr(thing, '__module__', '')}.".startswith(f"{home}."):
        return False
    if isinstance(thing, types.FunctionType):
        return owner is not torch and all(_in_torchs_files(function) for function in _unwrapped(thing))
    return isinstance(thing, types.BuiltinFunctionType | type | type(torch.FloatTensor))


def _unwrapped(function: Any) -> Iterator[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _in_torchs_files(function: Any) -> bool:
    """Whether its code is torch's, or the decorator that torch uses for deprecated functions."""
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    file = Path(code.co_filename)
    return file.is_relative_to(Path(torch.__file__).parent) or file == Path(typing_extensions.__file__)


def _origin(thing: Any) -> str:
    """The origin of an object: the file and line of a function, or else its qualified name."""
    foreign = [f for f in _unwrapped(thing) if hasattr(f, "__code__") and not _in_torchs_files(f)]
    code = getattr((foreign or [thing])[0], "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    name = getattr(thing, "__qualname__", None)
    return f"{getattr(thing, '__module__', None) or 'torch'}.{name}" if name else f"a {type(thing).__name__}: {thing!r}"


def _current(patch: Patch) -> Any:
    return getattr(patch.owner, patch.name, None)


def _path(patch: Patch) -> str:
    return f"{patch.owner.__name__}.{patch.name}"


def _rebind(replacements: Mapping[int, Any]) -> None:
    """Applies replacements (id of the old object -> new object) to the references in megatron's loaded modules: names
    imported from torch, and default values of parameters."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("megatron.")]
    for module in modules:
        if not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            if id(value) in replacements:
                setattr(module, key, replacements[id(value)])
            elif isinstance(value, types.FunctionType):
                _rebind_defaults(value, replacements)
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for method in vars(value).values():
                    if isinstance(method, types.FunctionType):
                        _rebind_defaults(method, replacements)


def _rebind_defaults(function: types.FunctionType, replacements: Mapping[int, Any]) -> None:
    if any(id(value) in replacements for value in function.__defaults__ or ()):
        function.__defaults__ = tuple(replacements.get(id(value), value) for value in function.__defaults__ or ())


@contextlib.contextmanager
def _quiet(proxy: DeviceProxy) -> Iterator[None]:
    """On the host, suppresses the RNG tracker's warning that the CPU generator changed, as it is also the device's."""
    logger = logging.getLogger("megatron.core.tensor_parallel.random")

    def not_that_warning(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("CPU RNG state changed")

    if proxy.host:
        logger.addFilter(not_that_warning)
    try:
        yield
    finally:
        logger.removeFilter(not_that_warning)
