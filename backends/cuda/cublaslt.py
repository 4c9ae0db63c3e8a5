"""gelu(x W^T + bias) by one kernel of cuBLASLt, whose epilogue also stores the argument of gelu for the backward pass.

torch has no call for this epilogue (CUBLASLT_EPILOGUE_GELU_AUX_BIAS; its `_addmm_activation` keeps no argument), so the
library that torch has loaded is called through ctypes, with cublasLt.h's names and values. cuBLASLt's matrices are
column-major: y^T [out, rows] = W x^T.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hal
from hal import Call, by_metadata, ops

from . import launch
from .activation import gradient
from .device import Cuda
from .tensors import LANES, dense, reasons

_TYPE = {torch.float16: 2, torch.bfloat16: 14}
"""cudaDataType_t: CUDA_R_16F, CUDA_R_16BF."""
_R_32F, _COMPUTE_32F = 0, 68
_TRANSA, _EPILOGUE, _BIAS_POINTER, _AUX_POINTER, _AUX_LD = 3, 7, 8, 11, 12
"""cublasLtMatmulDescAttributes_t."""
_TRANSPOSED, _GELU_AUX_BIAS = 1, 32 | 128 | 4
_MAX_WORKSPACE = 1
_MIN_ALIGNMENT = (5, 6, 7, 8)
"""cublasLtMatmulPreferenceAttributes_t; of A, B, C and D."""
_WORKSPACE = 32 << 20
"""Bytes that an algorithm may use, as torch allows its own products on Hopper."""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@cache
def _library() -> Any:
    return ctypes.CDLL(f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}")


def _call(name: str, *arguments: Any) -> None:
    """Raises HalError unless the function returns CUBLAS_STATUS_SUCCESS."""
    status = getattr(_library(), name)(*arguments)
    if status:
        raise hal.HalError(f"{name} returned status {status} (cublasStatus_t in cublas_api.h)")


def _created(kind: str, *arguments: Any) -> ctypes.c_void_p:
    """A descriptor; its owner destroys it."""
    descriptor = ctypes.c_void_p()
    _call(f"cublasLt{kind}Create", ctypes.byref(descriptor), *arguments)
    return descriptor


def _set(kind: str, descriptor: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _call(
        f"cublasLt{kind}SetAttribute", descriptor, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))
    )


class _Product:
    """The descriptors of products of one shape, and the algorithm that cuBLASLt's heuristic prefers.

    Raises HalError if cuBLASLt has none. To be used on one thread, because every call sets addresses.
    """

    def __init__(self, dtype: torch.dtype, rows: int, n_out: int, n_in: int) -> None:
        kind, long = _TYPE[dtype], ctypes.c_uint64
        self.matmul = _created("MatmulDesc", _COMPUTE_32F, _R_32F)
        shapes = [(n_in, n_out), (n_in, rows), (n_out, rows)]  # W, x and y
        self.layouts = [_created("MatrixLayout", kind, long(a), long(b), ctypes.c_int64(a)) for a, b in shapes]
        preference = _created("MatmulPreference")
        owned = [("MatmulDesc", self.matmul), ("MatmulPreference", preference)]
        weakref.finalize(self, _destroy, owned + [("MatrixLayout", layout) for layout in self.layouts])
        self.set(_TRANSA, ctypes.c_int32(_TRANSPOSED))
        self.set(_EPILOGUE, ctypes.c_uint32(_GELU_AUX_BIAS))
        self.set(_AUX_LD, ctypes.c_int64(n_out))
        for attribute in (_BIAS_POINTER, _AUX_POINTER):  # the heuristic derives alignment from addresses
            self.set(attribute, ctypes.c_uint64(256))
        _set("MatmulPreference", preference, _MAX_WORKSPACE, ctypes.c_uint64(_WORKSPACE))
        for attribute in _MIN_ALIGNMENT:
            _set("MatmulPreference", preference, attribute, ctypes.c_uint32(16))
        weight, x, y = self.layouts
        self.heuristic, found = _Heuristic(), ctypes.c_int()
        handle = ctypes.c_void_p(torch.cuda.current_blas_handle())
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            *(handle, self.matmul, weight, x, y, y, preference, 1),
            *(ctypes.byref(self.heuristic), ctypes.byref(found)),
        )
        if not found.value or self.heuristic.state:
            raise hal.HalError("cublasLtMatmulAlgoGetHeuristic found no algorithm")

    def set(self, attribute: int, value: Any) -> None:
        _set("MatmulDesc", self.matmul, attribute, value)

    def run(self, x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, argument: Tensor) -> None:
        """Queues y = gelu(argument) and argument = x weight^T + bias on the current stream. All are contiguous."""
        self.set(_BIAS_POINTER, ctypes.c_uint64(bias.data_ptr()))
        self.set(_AUX_POINTER, ctypes.c_uint64(argument.data_ptr()))
        size = self.heuristic.workspace
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        at = [ctypes.c_void_p(t.data_ptr()) for t in (weight, x, y)]
        layouts = self.layouts
        _call(
            "cublasLtMatmul",
            *(ctypes.c_void_p(torch.cuda.current_blas_handle()), self.matmul, ctypes.byref(one)),
            *(at[0], layouts[0], at[1], layouts[1], ctypes.byref(zero), at[2], layouts[2], at[2], layouts[2]),
            *(ctypes.byref(self.heuristic.algo), ctypes.c_void_p(workspace.data_ptr()), ctypes.c_size_t(size)),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )


def _destroy(descriptors: Sequence[tuple[str, ctypes.c_void_p]]) -> None:
    for kind, descriptor in descriptors:
        _call(f"cublasLt{kind}Destroy", descriptor)


class _Products(threading.local):
    """The products of this thread; the oldest are forgotten, because generation has prompts of many lengths."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], _Product] = {}

    def __call__(self, *key: Any) -> _Product:
        """key: the index of the device, then the arguments of _Product."""
        if key not in self._made:
            while len(self._made) >= 256:
                del self._made[next(iter(self._made))]
            self._made[key] = _Product(*key[1:])
        return self._made[key]


_products = _Products()


@by_metadata
def _why_not(call: Call) -> Sequence[str]:
    refusals = list(reasons(call.x, call.weight, call.bias))
    if call.activation != "gelu" or call.approximate != "tanh":
        form = call.activation if call.activation != "gelu" else f"gelu in the form {call.approximate!r}"
        refusals.append(f"{form} (cuBLASLt's epilogue is gelu in the form 'tanh')")
    if call.bias is None:
        refusals.append("no bias (the epilogue adds one)")
    if call.x.dtype not in _TYPE:
        refusals.append(f"dtype {call.x.dtype} (products of bfloat16 and float16)")
    n_out, n_in = call.weight.shape
    lanes = LANES[torch.bfloat16]  # of both types
    if n_out % lanes or n_in % lanes:
        refusals.append(f"sizes {n_in} and {n_out} (rows of a multiple of 16 bytes)")
    if not call.x.numel() or not n_out:
        refusals.append("an empty product")
    if not refusals and not launch.simulated() and call.x.is_cuda:
        try:
            with torch.cuda.device(call.x.device):
                _products(call.x.device.index, call.x.dtype, call.x.numel() // n_in, n_out, n_in)
        except (OSError, hal.HalError) as error:
            refusals.append(f"cuBLASLt: {error}")
    return refusals


def stand_in(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The result and the argument of gelu on the simulator."""
    exact = F.linear(x.float(), weight.float(), bias.float())
    return F.gelu(exact, approximate="tanh").to(x.dtype), exact.to(x.dtype)


def _bwd(residuals: tuple[Any, ...], dy: Tensor, needs: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of x [..., in], weight [out, in] and bias [out] from dy [..., out], as far as `needs` requires."""
    x, weight, bias, argument = residuals
    dbias = torch.empty_like(bias) if needs[2] else None
    dz = gradient(argument, None, "tanh", False, dy, dbias)  # the argument includes the bias
    dx = dz @ weight if needs[0] else None
    dweight = dz.reshape(-1, dz.shape[-1]).t() @ x.reshape(-1, x.shape[-1]) if needs[1] else None
    return dx, dweight, dbias


@Cuda.impl(ops.linear_bias_activation, id="cuda/cublaslt", why_not=_why_not, bwd=_bwd)
def linear_bias_activation(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str, approximate: str = "tanh"
) -> tuple[Tensor, tuple[Any, ...]]:
    """The argument of gelu is stored without gradients, too: activation recomputation then gets the same bits."""
    assert bias is not None
    x, weight, bias = dense(x), dense(weight), dense(bias)
    if launch.simulated():
        y, argument = stand_in(x, weight, bias)
    else:
        y = torch.empty(*x.shape[:-1], len(weight), dtype=x.dtype, device=x.device)
        argument = torch.empty_like(y)
        with torch.cuda.device(x.device):
            product = _products(x.device.index, x.dtype, x.numel() // x.shape[-1], *weight.shape)
            product.run(x, weight, bias, y, argument)
    return y, (x, weight, bias, argument)
