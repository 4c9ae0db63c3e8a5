"""The two functions behind `op(...)`: what eager code runs, and what torch.compile traces in its place.

The eager function is generated from source text, because its time is HAL's overhead: it looks up the call's metadata in
the op's memo and runs the function found there. All calls that are not plain eager calls are passed to `Op.transformed`
or `Op.resolve`.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.autograd.forward_ad
import torch.utils._python_dispatch

from . import torch_arguments
from .shared_memory import refuse_repeated, refuse_shared_memory
from .signature import Kind, Schema, define, fragments
from .torch_versions import skip_frame

_METADATA: dict[Kind, str] = {
    "tensor": "{0}.shape, {0}.dtype, {0}.is_cpu",
    "rng": "{0}.full_shape, {0}.start",
    "comm": "{0}.size",
    "plain": "{0}",
}
"""By kind of parameter: what a check, or a why_not marked with `by_metadata`, may depend on, as source text."""


_MANY = 8
"""Options from which on binding them once is faster than passing them by name on every call (about 20 ns each)."""


def options(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters."""
    return {name: p for name, p in signature.parameters.items() if p.kind is p.KEYWORD_ONLY}


class Bound:
    """An implementation with the plain options of one memo key. run: takes the op's other arguments, by position."""

    __slots__ = ("run",)

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run

    @classmethod
    def of(cls, signature: inspect.Signature, schema: Schema, run: Callable[..., Any], call: Any) -> Bound | None:
        """`run` for all calls with the metadata of `call`.

        None if the op has few options, if one holds a tensor, or if `run` is not a Python function that names them.

        Equal plain values have one memo key. So the implementation receives the value that the first call gave, which
        may be the integer 1 where a later call gives 1.0.
        """
        named = options(signature)
        given = {name: getattr(call, name) for name, p in named.items() if getattr(call, name) is not p.default}
        if len(named) < _MANY or any(schema.parameters[name].kind != "plain" for name in given):
            return None
        if not isinstance(run, types.FunctionType) or not named.keys() <= set(run.__code__.co_varnames[: _taken(run)]):
            return None
        # The same function with the options as its defaults: no further call, and no arguments passed by name.
        bound = types.FunctionType(run.__code__, run.__globals__, run.__name__, run.__defaults__, run.__closure__)
        bound.__kwdefaults__ = {**(run.__kwdefaults__ or {}), **given}
        return cls(bound)


def _taken(function: types.FunctionType) -> int:
    """The number of a function's parameters, without *args and **kwargs."""
    return function.__code__.co_argcount + function.__code__.co_kwonlyargcount


def memo_key(signature: inspect.Signature, schema: Schema) -> str | None:
    """Source text of the memo key of a call: the metadata of all arguments, as the elements of one tuple.

    None for an op on lists of tensors: reading the metadata of hundreds of tensors would cost as much as the check.
    """
    elements: list[str] = []
    absent: dict[str, tuple[str, str]] = {}  # parameter -> the condition under which it is absent, its element if not
    required = [p.name for p in schema.parameters.values() if p.kind == "tensor" and not p.optional]
    flags = {name: p.default for name, p in signature.parameters.items() if isinstance(p.default, bool)}
    for p in schema.parameters.values():
        if p.kind == "tensors":
            return None
        metadata = _METADATA[p.kind].format(p.name)
        if p.optional and p.kind != "plain":
            absent[p.name] = (f"{p.name} is None", f"{p.name} if {p.name} is None else ({metadata})")
        elif p.name in flags:
            absent[p.name] = (f"{p.name} is {flags[p.name]}", p.name)
        elif p.name in required:
            elements.append(f"{p.name}.shape, {p.name}.dtype")
        else:
            elements.append(metadata)  # a value of a plain type is its own metadata, None included
    if required:
        # Fake tensors have another type, which is read of one tensor only, because either all tensors of a call are
        # fake or none is. The same applies to is_meta, which is not read of tensors on the CPU.
        on_cpu = [f"{name}.is_cpu" for name in required]
        elements.append(f"type({required[0]}), {' and '.join(on_cpu)} or ({', '.join(on_cpu)}, {required[0]}.is_meta)")
    if len(absent) <= 2:
        elements += [element for _, element in absent.values()]
    else:
        # Most calls give none of them. One element of the key for all of them is then faster than one for each.
        none = " and ".join(condition for condition, _ in absent.values())
        elements.append(f"None if {none} else ({', '.join(element for _, element in absent.values())},)")
    return ", ".join(elements)


def source(signature: inspect.Signature, key: str | None, written: Sequence[str], lists: Sequence[str] = ()) -> str:
    """Source text of an op's __call__: looks up the function for the call's metadata, or calls `resolve` for a new one.

    This is the entire overhead compared with a direct call (0.6 to 1 us), hence one function without a loop. For
    rms_norm, apart from the transforms, it is

        def __call__(_self, x, weight, eps=1e-5):
            try:
                _key = (type(x), x.shape, x.dtype, ..., weight.shape, weight.dtype, weight.is_cpu, eps)
                _run = _memo[_key]
            except (KeyError, AttributeError, TypeError):
                _run = None
            if _run is None:
                _run = _self.resolve(_key, x, weight, eps)
            return _run(x, weight, eps)

    written: the parameters that are tensors and written in place. lists: those that are lists of such tensors.
    """
    f = fragments(signature)
    end = f"    return _run({f.passed})\n"
    if len(options(signature)) >= _MANY:
        others = ", ".join(name for name in f.names if name not in options(signature))
        end = f"    if type(_run) is _Bound:\n        return _run.run({others})\n{end}"
    if written:
        read = [name for name in f.names if name not in written]
        end = f"    _refuse_shared(_self.name, {_named(written)}, {_named(read)})\n{end}"
    if lists:
        read = [name for name in f.names if name not in lists]
        end = f"    _refuse_repeated(_self.name, {_named(lists)}, {_named(read)})\n{end}"
    start = (
        f"def __call__(_self, {f.header}):\n"
        # The last two are thread-local. The first may be true because of a mode in another thread.
        f"    if _modes._is_in_torch_dispatch_mode or _transforms() or _forward_ad._current_level >= 0:\n"
        f"        _run = _self.transformed({f.passed})\n"
        f"        if _run is not None:\n"
        f"            return _run({f.passed})\n"
    )
    if key is None:
        return start + f"    _run = _self.resolve_unremembered({f.passed})\n{end}"
    return (
        start + f"    _key = None\n"
        f"    try:\n"
        f"        _key = ({key},)\n"
        f"        _run = _memo[_key]\n"
        # KeyError: new metadata. AttributeError: not a tensor where one should be. TypeError: a list, which cannot be
        # hashed, among the plain values. The call is resolved outside of the handler, so that its errors are not
        # chained to the handled one.
        f"    except (KeyError, AttributeError, TypeError):\n"
        f"        _run = None\n"
        f"    if _run is None:\n"
        f"        _run = _self.resolve(_key, {f.passed})\n"
        f"{end}"
    )


def _named(names: Sequence[str]) -> str:
    """Source text of a dictionary of the arguments with these names."""
    return "{" + ", ".join(f"{name!r}: {name}" for name in names) + "}"


def eager(
    signature: inspect.Signature,
    schema: Schema,
    memo: dict[tuple[Any, ...], Callable[..., Any] | Bound],
    name: str,
    mutates: Sequence[str],
) -> Callable[..., Any]:
    """The __call__ of an op. torch.compile does not trace its frame when an uncompiled frame calls it."""
    f = fragments(signature)
    states = {
        "_modes": torch.utils._python_dispatch,
        "_transforms": torch._C._are_functorch_transforms_active,
        "_forward_ad": torch.autograd.forward_ad,
        "_refuse_shared": refuse_shared_memory,
        "_refuse_repeated": refuse_repeated,
        "_Bound": Bound,
    }
    written = [p for p in schema.parameters.values() if p.name in mutates]
    call = define(
        "__call__",
        source(
            signature,
            memo_key(signature, schema),
            *([p.name for p in written if p.kind == k] for k in ("tensor", "tensors")),
        ),
        {"_memo": memo, **states, **f.scope},
        f"dispatch of {name}",
    )
    skip_frame(call.__code__)
    return call


def traced(
    signature: inspect.Signature,
    schema: Schema,
    arguments: Sequence[torch_arguments.Argument],
    name: str,
    *,
    lower: Callable[[], object],
    run: Callable[[], Callable[..., Any]],
) -> Callable[..., Any]:
    """The function that torch.compile traces in place of an op's __call__: a call of the op's torch op.

    A communicator of several ranks breaks the graph, because torch's graphs have no place for one. lower: defines the
    torch op. run: returns the op.
    """

    def defined() -> None:
        lower()

    def outside(*args: Any, **kwargs: Any) -> Any:
        return run()(*args, **kwargs)

    # The attributes are those that the decorators of torch.compiler set.
    defined._dynamo_marked_constant = True  # type: ignore[attr-defined]
    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    outside._torchdynamo_disable_msg = f"{name} with a communicator of several ranks runs outside of graphs"  # type: ignore[attr-defined]
    f = fragments(signature)
    comms = [p.name for p in schema.parameters.values() if p.kind == "comm"]
    one_or_several = "    return _result[0] if len(_result) == 1 else tuple(_result)\n"
    text = (
        f"def traced(_self, {f.header}):\n"
        + "".join(f"    if {c} is not None and {c}.size > 1:\n        return _outside({f.passed})\n" for c in comms)
        + "    _defined()\n"
        + f"    _result = _ops.hal.{name}.default({torch_arguments.flattened(arguments)})\n"
        + (one_or_several if schema.returns == "tensors" else "    return _result\n")
    )
    scope = {"_defined": defined, "_outside": outside, "_ops": torch.ops, **torch_arguments.SCOPE, **f.scope}
    return define("traced", text, scope, f"trace of {name}")
