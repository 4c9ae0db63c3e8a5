"""What backends ask of tensors: reasons to refuse them, rows, groups, copies."""

from __future__ import annotations

import pytest
import torch

from hal import backend_tools


def test_host_reasons_name_each_wrong_dtype_and_device_once() -> None:
    reasons = backend_tools.host_tensor_reasons({torch.float32: "f32"}, "float32 only", "host memory only")
    x = torch.ones(2)
    assert reasons(x, None, x.to("meta")) == ()
    assert reasons(x, x.double(), x.double(), x.half()) == [
        "dtype torch.float64 (float32 only)",
        "dtype torch.float16 (float32 only)",
    ]
    elsewhere = torch.ones(2, device=torch.device("meta")).as_subclass(_Elsewhere)
    assert reasons(x, elsewhere) == ["a tensor on xpu:0 (host memory only)"]


class _Elsewhere(torch.Tensor):
    """A tensor that reports a device that this machine does not have."""

    is_meta = False
    is_cpu = False
    device = torch.device("xpu", 0)


@pytest.mark.parametrize("shape, rows", [((3, 4, 5), 12), ((7,), 1), ((0, 4), 0), ((4, 0), 0)])
def test_rows_are_counted_along_the_last_dimension(shape: tuple[int, ...], rows: int) -> None:
    assert backend_tools.rows_of(torch.empty(shape)) == rows


def test_tensors_are_grouped_in_the_order_of_their_dtypes() -> None:
    a, b, c = torch.ones(1), torch.ones(1).half(), torch.ones(2)
    groups = backend_tools.by_dtype([a, b, c])
    assert list(groups) == [torch.float32, torch.float16]
    assert groups[torch.float32][1] is c


def test_results_of_copies_return_to_tensors_with_gaps() -> None:
    gaps, whole = torch.zeros(3, 4)[:, :2], torch.zeros(2)
    dense = [t.contiguous() for t in (gaps, whole)]
    for t in dense:
        t.fill_(5.0)
    backend_tools.copy_back([gaps, whole], dense)
    assert (gaps == 5.0).all() and (whole == 5.0).all()
