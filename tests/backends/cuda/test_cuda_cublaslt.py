"""gelu(x W^T + bias) by cuBLASLt: what it computes, what it refuses, and that the library gets the right matrices."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

import hal
from hal import ops
from hal.backends.cuda import Cuda, cublaslt
from hal.backends.cuda.tensors import dense

(IMPL,) = Cuda.impls["linear_bias_activation"]


def operands(rows: int = 6, n_in: int = 16, n_out: int = 24, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = (rows, n_in), (n_out, n_in), (n_out,)
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


def test_values_and_gradients_are_the_references(simulated: Cuda) -> None:
    leaves = [t.requires_grad_() for t in operands()]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    assert hal.why(ops.linear_bias_activation, *leaves, activation="gelu").chosen == "cuda/cublaslt"
    y = ops.linear_bias_activation(*leaves, activation="gelu")
    expected = ops.linear_bias_activation.reference(*exact, activation="gelu")
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=1e-2)
    dy = torch.randn_like(y)
    gradients = torch.autograd.grad(expected, exact, dy.double())
    for got, wanted in zip(torch.autograd.grad(y, leaves, dy), gradients):
        torch.testing.assert_close(got.double(), wanted, rtol=2**-6, atol=6e-2)


def test_operands_off_16_byte_boundaries_are_copied() -> None:
    row = torch.arange(25, dtype=torch.bfloat16)
    aligned = row[:24].view(3, 8)
    assert dense(aligned).data_ptr() == aligned.data_ptr()
    for other in (row[1:].view(3, 8), aligned.t()):
        copy = dense(other)
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0 and torch.equal(copy, other)


REFUSED = [
    ({"activation": "swiglu"}, {}, "swiglu (cuBLASLt's epilogue is gelu"),
    ({"approximate": "none"}, {}, "gelu in the form 'none'"),
    ({"bias": None}, {}, "no bias"),
    ({}, {"dtype": torch.float32}, "dtype torch.float32"),
    ({}, {"n_in": 12}, "sizes 12 and 24"),
    ({}, {"n_out": 20}, "sizes 16 and 20"),
    ({}, {"rows": 0}, "an empty product"),
]


@pytest.mark.parametrize("changed, sizes, text", REFUSED, ids=range(len(REFUSED)))
def test_what_the_epilogue_lacks_is_refused_with_the_reason(simulated: Cuda, changed, sizes, text) -> None:
    x, weight, bias = operands(**sizes)
    arguments = {"x": x, "weight": weight, "bias": bias, "activation": "gelu", "approximate": "tanh", **changed}
    ops.linear_bias_activation.verify(**arguments)
    refusals = IMPL.refusals(ops.linear_bias_activation.Call(**arguments))
    assert len(refusals) == 1 and text in refusals[0]


class Library:
    """The functions of libcublasLt that are called, on host memory, after the documentation in cublasLt.h."""

    def __init__(self, algorithms: int = 1) -> None:
        self.objects: dict[int, dict[object, object]] = {}
        self.algorithms = algorithms

    def _create(self, out, **values) -> int:
        out._obj.value = max(self.objects, default=0) + 1
        self.objects[out._obj.value] = values
        return 0

    def cublasLtMatmulDescCreate(self, out, compute, scale) -> int:
        return self._create(out, compute=compute, scale=scale)

    def cublasLtMatmulPreferenceCreate(self, out) -> int:
        return self._create(out)

    def cublasLtMatrixLayoutCreate(self, out, kind, rows, columns, ld) -> int:
        return self._create(out, kind=kind, rows=rows.value, columns=columns.value, ld=ld.value)

    def _set(self, descriptor, attribute, pointer, size) -> int:
        assert size.value == ctypes.sizeof(pointer._obj)
        self.objects[descriptor.value][attribute] = pointer._obj.value
        return 0

    cublasLtMatmulDescSetAttribute = cublasLtMatmulPreferenceSetAttribute = _set

    def _destroy(self, descriptor) -> int:
        del self.objects[descriptor.value]
        return 0

    cublasLtMatmulDescDestroy = cublasLtMatmulPreferenceDestroy = cublasLtMatrixLayoutDestroy = _destroy

    def cublasLtMatmulAlgoGetHeuristic(self, handle, matmul, a, b, c, d, preference, requested, results, found) -> int:
        assert self.objects[preference.value] == {1: 32 << 20, **dict.fromkeys((5, 6, 7, 8), 16)} and requested == 1
        found._obj.value, results._obj.workspace = self.algorithms, 64
        return 0

    def _matrix(self, address: int, layout) -> Tensor:
        """[rows, columns] of a column-major matrix, as a view."""
        values = self.objects[layout.value]
        assert values["kind"] == 14  # CUDA_R_16BF
        count = values["ld"] * values["columns"]
        raw = torch.frombuffer((ctypes.c_char * (2 * count)).from_address(address), dtype=torch.bfloat16)
        return raw.view(values["columns"], values["ld"])[:, : values["rows"]].t()

    def cublasLtMatmul(
        self, handle, matmul, alpha, a, la, b, lb, beta, c, lc, d, ld, algo, workspace, size, stream
    ) -> int:
        assert (handle.value, stream.value, alpha._obj.value, beta._obj.value, size.value) == (11, 22, 1.0, 0.0, 64)
        how = self.objects[matmul.value]
        assert (how["compute"], how["scale"], how[3], how[7]) == (68, 0, 1, 32 | 128 | 4)
        left, right, out = self._matrix(a.value, la), self._matrix(b.value, lb), self._matrix(d.value, ld)
        bias = torch.frombuffer((ctypes.c_char * (2 * len(out))).from_address(how[8]), dtype=torch.bfloat16)
        z = left.t().float() @ right.float() + bias.float()[:, None]
        aux = torch.frombuffer(
            (ctypes.c_char * (2 * how[12] * out.shape[1])).from_address(how[11]), dtype=torch.bfloat16
        )
        aux.view(out.shape[1], how[12])[:, : len(out)].t().copy_(z)
        out.copy_(torch.nn.functional.gelu(z, approximate="tanh"))
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()

    class Stream:
        cuda_stream = 22

    monkeypatch.setattr(cublaslt, "_library", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 11)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    return made


def test_the_library_gets_the_matrices_and_the_epilogue(library: Library) -> None:
    x, weight, bias = operands()
    y, argument = torch.empty(6, 24, dtype=x.dtype), torch.empty(6, 24, dtype=x.dtype)
    product = cublaslt._Product(x.dtype, 6, 24, 16)
    product.run(x, weight, bias, y, argument)
    z = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(argument, z.to(x.dtype))
    torch.testing.assert_close(y, torch.nn.functional.gelu(z, approximate="tanh").to(x.dtype))
    del product
    assert not library.objects  # the descriptors were destroyed


def test_a_shape_without_an_algorithm_is_an_error(library: Library) -> None:
    library.algorithms = 0
    with pytest.raises(hal.HalError, match="no algorithm"):
        cublaslt._Product(torch.bfloat16, 6, 24, 16)
    assert not library.objects


def test_products_of_many_shapes_are_forgotten(library: Library) -> None:
    products = cublaslt._Products()
    for rows in range(1, 300):
        products(0, torch.bfloat16, rows, 24, 16)
    assert len(library.objects) == 256 * 5
    assert products(0, torch.bfloat16, 299, 24, 16) is products(0, torch.bfloat16, 299, 24, 16)
