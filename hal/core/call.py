"""The arguments of one call of an op as one object, which `check` and `why_not` receive."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .signature import define, fragments


class Call:
    """The arguments of a call, as attributes with the names of the op's parameters; defaults are filled in.

    Each op has its own subclass, `op.Call`, whose constructor has the op's signature:

    >>> call = hal.ops.rms_norm.Call(torch.ones(2, 8), torch.ones(8))
    >>> call.x.shape, call.eps
    (torch.Size([2, 8]), 1e-05)
    """

    __slots__: tuple[str, ...] = ()

    if TYPE_CHECKING:

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    def __repr__(self) -> str:
        values = ((name, getattr(self, name)) for name in self.__slots__)
        return f"{type(self).__name__}({', '.join(f'{name}={_describe(value)}' for name, value in values)})"


def call_class(name: str, signature: inspect.Signature) -> type[Call]:
    """The subclass of Call for an op with this name and signature."""
    f = fragments(signature)
    # Generated like an op's __call__, because a why_not that depends on strides needs a Call on every call of the op.
    source = f"def __init__(_self, {f.header}):\n" + "".join(f"    _self.{p} = {p}\n" for p in f.names)
    init = define("__init__", source, dict(f.scope), f"call of {name}")
    return type(name, (Call,), {"__slots__": f.names, "__init__": init, "__module__": __name__})


def _describe(value: object) -> str:
    """A tensor by shape and dtype; anything else by its repr."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_describe, value))}]"
    return repr(value)
