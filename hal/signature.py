"""Source fragments for functions that repeat an op's signature.

HAL generates two functions per op (its dispatcher and each implementation's autograd wrapper) as source text, like a
dataclass's __init__: binding *args and **kwargs generically would cost more than the whole dispatch budget of 1 us.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fragments:
    """header: parameters as in a def; passed: the same names as a call's arguments; names: just the names.

    scope: values the header's defaults refer to.
    """

    header: str
    passed: str
    names: tuple[str, ...]
    scope: dict[str, Any]


def fragments(signature: inspect.Signature) -> Fragments:
    """The fragments of `signature`; keyword-only parameters stay keyword-only."""
    header: list[str] = []
    scope: dict[str, Any] = {}
    parameters = list(signature.parameters.values())
    for i, p in enumerate(parameters):
        if p.kind is p.KEYWORD_ONLY and (i == 0 or parameters[i - 1].kind is not p.KEYWORD_ONLY):
            header.append("*")
        if p.default is p.empty:
            header.append(p.name)
        else:
            scope[f"_default_{p.name}"] = p.default
            header.append(f"{p.name}=_default_{p.name}")
    passed = ", ".join(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in parameters)
    return Fragments(", ".join(header), passed, tuple(signature.parameters), scope)


def define(name: str, source: str, scope: dict[str, Any], where: str) -> Callable[..., Any]:
    """Runs `source`, which defines `name`, in `scope`; `where` shows up in tracebacks."""
    exec(compile(source, f"<hal: {where}>", "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return function


def annotation_text(annotation: object) -> str:
    """An annotation as written, without module names, whether it is still a string or already a type."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(\w+\.)+(?=\w)", "", text)


def tensor_kind(annotation: object) -> str:
    """ "tensor", "optional" (tensor or None), "tensors" (a sequence of them), or "" for anything else."""
    text = annotation_text(annotation)
    if re.fullmatch(r"Tensor", text):
        return "tensor"
    if re.fullmatch(r"Tensor \| None", text):
        return "optional"
    return "tensors" if re.search(r"\[Tensor\]", text) else ""
