"""cuda/fa3 and cuda/fa4: FlashAttention-3 (Hopper) and FlashAttention-4 (Hopper and Blackwell) from their wheels.

torch calls both in torch.nn.attention._fa3 and _fa4. `torch.nn.attention.activate_flash_attention_impl` would put one
of them in the place of torch's own FlashAttention for the whole process. Here the functions that it installs are called
instead, so that the process keeps what it has chosen, and each call of HAL its own implementation.

On the simulator the same functions of torch call stand-ins of the wheels.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hal import Unavailable
from hal.backend_tools import AttentionSpec

from .. import launch
from .common import Given, Request, negative_window, register, sixteen_bit
from .flash import lengths, rows, shown_lse

STAND_IN = "hal.backends.cuda.attention.stand_in_wheels"


@dataclass(frozen=True)
class Wheel:
    """One generation of FlashAttention. module: the wheel's, by its import name; package: how it is installed; majors:
    the compute capabilities that it has kernels for; widest: the largest head size."""

    name: str
    module: str
    package: str
    majors: tuple[int, ...]
    widest: int

    def function(self, what: str) -> Any:
        """torch's function that calls the wheel; what: "import_module", "run_forward" or "run_backward". Raises
        ModuleNotFoundError if torch has none."""
        name = self.name.lower()
        front: Any = importlib.import_module(f"torch.nn.attention._{name}")
        if self is FA4:  # torch sets it where it also replaces the kernels of the process
            front._FA4_MODULE_PATH = self.path
        return getattr(front, f"_{name}_{what}")

    @property
    def path(self) -> str:
        return STAND_IN if launch.simulated() else self.module


FA3 = Wheel("FA3", "flash_attn_interface", "flash-attn-3", (9,), 256)
FA4 = Wheel("FA4", "flash_attn.cute.interface", "flash-attn-4", (9, 10), 128)


@cache
def _missing(wheel: Wheel, path: str) -> str:
    """Why the wheel cannot be called; "" if it can. path: the module that is imported."""
    try:
        wheel.function("import_module")(path)
    except Exception as error:  # at import, a wheel for another torch or CUDA fails in any way
        return (
            f"{type(error).__name__}: {error} ({wheel.name} needs a torch that calls it, as 2.13 does, and the wheel "
            f"{wheel.package} with its module {wheel.module})"
        )
    return ""


@cache
def _major(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


def _device_refusals(wheel: Wheel) -> list[str]:
    if not launch.simulated() and torch.cuda.is_available():
        major = _major(torch.cuda.current_device())
        if major not in wheel.majors:
            listed = " and ".join(f"{n}.x" for n in wheel.majors)
            return [Unavailable(f"compute capability {major}.x ({wheel.name} has kernels for {listed})")]
    missing = _missing(wheel, wheel.path)
    return [Unavailable(missing)] if missing else []


def _windows(spec: AttentionSpec) -> tuple[int, int]:
    """(left, right) as torch passes them on, -1 where a side hides nothing."""
    left = -1 if spec.pre is None or spec.pre >= spec.skv else spec.pre
    right = -1 if spec.next is None or spec.next >= spec.sq - 1 else spec.next
    return left, right


def _register(wheel: Wheel) -> None:
    def refuse(request: Request) -> list[str]:
        spec, name = request.spec, wheel.name
        refusals = sixteen_bit(request, name) + negative_window(spec, name)
        if spec.d % 8 or spec.d > wheel.widest:
            refusals.append(f"head size {spec.d} ({name} takes multiples of 8 up to {wheel.widest})")
        return [*refusals, *_device_refusals(wheel)]

    def forward(
        spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, given: Given
    ) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
        q, k, v = (rows(x, spec.packed) for x in (q, k, v))
        longest, cu_q, cu_k = (spec.sq, spec.skv), given.cu_q, given.cu_k
        if cu_q is not None and cu_k is not None:
            longest = lengths(spec, cu_q, cu_k)
            cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
        run = wheel.function("run_forward")
        out, lse = run(q, k, v, cu_q, cu_k, *longest, spec.scale, spec.causal, *_windows(spec), None)
        saved = (q, k, v, out, lse, cu_q, cu_k, *longest)
        shown = shown_lse(lse) if given.lse else lse
        out = (out[None] if spec.packed else out).transpose(1, 2)
        return out, shown[None] if spec.packed else shown, saved

    def backward(spec: AttentionSpec, saved: list[Any], dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, longest_q, longest_k = saved
        run = wheel.function("run_backward")
        # FlashAttention-4 finds the longest sequences itself.
        longest = (longest_q, longest_k) if wheel is FA3 else ()
        window = _windows(spec)
        grads = run(rows(dout, spec.packed), *inputs, *longest, spec.scale, spec.causal, *window, launch.deterministic)
        dq, dk, dv = ((g[None] if spec.packed else g).transpose(1, 2) for g in grads)
        return dq, dk, dv

    register(f"cuda/{wheel.name.lower()}", refuse=refuse, forward=forward, backward=backward)


_register(FA3)
_register(FA4)
