"""How the arguments of a HAL op become those of its torch op, and back.

Tensors, sequences and plain values are passed as they are; a random stream as a tensor of its integers and two shapes;
a communicator and hints not at all. `flattening` makes the conversion as a function that torch.compile can trace.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import ContractError
from ..rng import Rng
from .signature import Parameter, Schema, define, fragments
from .tensor_rng import TensorRng, state_of


@dataclass(frozen=True)
class Value:
    """A parameter that is one argument of the torch op: a tensor, a sequence or a plain value."""

    parameter: Parameter
    mutable: bool
    """The op writes to it."""
    count = 1
    """The number of arguments of the torch op that represent the parameter."""

    def declare(self, position: int) -> list[str]:
        """The arguments in a torch.library schema; `position` makes alias names unique."""
        alias, declared = f"Tensor(a{position}!)" if self.mutable else "Tensor", self.parameter.torch_type
        # torch 2.6 cannot trace an op that writes to an optional list, so that an empty one stands for None.
        declared = declared.removesuffix("?") if self._empty_for_none else declared
        return [f"{declared.replace('Tensor', alias)} {self.parameter.name}"]

    @property
    def _empty_for_none(self) -> bool:
        return self.mutable and self.parameter.sequence and self.parameter.optional

    def flatten(self) -> list[str]:
        """Source text of the torch op's arguments for a value of the parameter."""
        name = self.parameter.name
        if not self.parameter.sequence:
            return [name]
        absent = "[]" if self._empty_for_none else "None"
        return [f"{absent} if {name} is None else list({name})" if self.parameter.optional else f"list({name})"]

    def restore(self, flat: Sequence[Any]) -> Any:
        """The parameter's value from the torch op's arguments."""
        return None if self._empty_for_none and not flat[0] else flat[0]


@dataclass(frozen=True)
class Stream:
    """An Rng as three arguments, its integers as a tensor; all three are None if the Rng is absent."""

    parameter: Parameter
    count = 3

    def declare(self, position: int) -> list[str]:
        name = self.parameter.name
        return [f"Tensor? {name}", f"SymInt[]? {name}_full", f"SymInt[]? {name}_start"]

    def flatten(self) -> list[str]:
        name = self.parameter.name
        shapes = [
            f"None if {name} is None or {name}.{f} is None else list({name}.{f})" for f in ("full_shape", "start")
        ]
        return [f"None if {name} is None else _state_of({name})", *shapes]

    def restore(self, flat: Sequence[Any]) -> Rng | TensorRng | None:
        state, full, start = flat
        if state is None:
            return None
        rng = TensorRng(state, full and tuple(full), start and tuple(start))
        # A fake's elements are unknown, and a reference that runs on fakes needs shapes only.
        return rng.plain() if type(state) is Tensor and not state.is_meta else _shapes_of(rng)


def _shapes_of(rng: TensorRng) -> Rng:
    plain = Rng(0)
    return plain if rng.full_shape is None or rng.start is None else plain.block(rng.full_shape, rng.start)


@dataclass(frozen=True)
class Constant:
    """A parameter that the torch op does not have, because a lowered op always runs with the same value of it.

    This applies to a Comm, which must have one rank (None), and to a hint, which keeps its default: compiled code
    decides by itself which memory is reused, so permissions to overwrite are not passed on.
    """

    parameter: Parameter
    value: Any
    count = 0

    def declare(self, position: int) -> list[str]:
        return []

    def flatten(self) -> list[str]:
        return []

    def restore(self, flat: Sequence[Any]) -> Any:
        return self.value


Argument = Value | Stream | Constant


def of(
    schema: Schema, signature: inspect.Signature, hints: Collection[str], mutates: Collection[str]
) -> list[Argument]:
    """The representation of each parameter of an op in its torch op."""

    def argument(parameter: Parameter) -> Argument:
        if parameter.kind == "comm":
            return Constant(parameter, None)
        if parameter.name in hints:
            return Constant(parameter, signature.parameters[parameter.name].default)
        if parameter.kind == "rng":
            return Stream(parameter)
        return Value(parameter, parameter.name in mutates)

    return [argument(p) for p in schema.parameters.values()]


def flattened(arguments: Sequence[Argument]) -> str:
    """Source text of the arguments of the torch op; it refers to `_state_of`, which `SCOPE` defines."""
    return ", ".join(text for a in arguments for text in a.flatten())


SCOPE = {"_state_of": state_of}


def flattening(
    name: str, schema: Schema, signature: inspect.Signature, arguments: Sequence[Argument]
) -> Callable[..., list[Any]]:
    """A function with the op's signature that returns the arguments of its torch op.

    It raises ContractError for a communicator of several ranks.
    """
    f = fragments(signature)
    comms = [p.name for p in schema.parameters.values() if p.kind == "comm"]
    source = (
        f"def flatten({f.header}):\n"
        + "".join(f"    if {c} is not None and {c}.size > 1:\n        _refuse_comm('{c}', {c})\n" for c in comms)
        + f"    return [{flattened(arguments)}]\n"
    )
    scope = {"_refuse_comm": functools.partial(_refuse_comm, name), **SCOPE, **f.scope}
    return define("flatten", source, scope, f"arguments of hal::{name}")


def _refuse_comm(op: str, name: str, comm: Any) -> None:
    raise ContractError(
        f"{op}: a lowered op takes no communicator; found {name} of {comm.size} ranks. "
        f"Call hal.ops.{op} outside of the compiled or transformed function"
    )
