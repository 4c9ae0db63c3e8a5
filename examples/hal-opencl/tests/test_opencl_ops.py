"""Additional cases for mistakes that occurred, or nearly occurred, while the kernels were written."""

import pytest
import torch

import hal
from hal import ops


def gradients(function, tensors, seed=0):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = function(*leaves)
    torch.manual_seed(seed)
    return torch.autograd.grad(y, leaves, torch.randn(y.shape, dtype=torch.float64).to(y.dtype))


def test_attention_keeps_rows_apart_from_a_tensor_of_the_same_shape(opencl):
    """With as many tokens as heads, the unrounded output, saved as rows, has the shape of q."""
    q = torch.randn(4, 4, 8, dtype=torch.bfloat16)
    cu = torch.tensor([0, 1, 4], dtype=torch.int32)
    how = {"layout": "TND", "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    actual = gradients(lambda *t: ops.flash_attention(*t, **how), (q, q, q))
    exact = gradients(lambda *t: ops.flash_attention.reference(*t, **how), (q.double(), q.double(), q.double()))
    for a, b in zip(actual, exact):
        assert torch.allclose(a.double(), b, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("ends", [[0, 3, 2, 4], [0, 3], [1, 4]])
def test_attention_refuses_sequences_that_are_none(opencl, ends):
    q, cu = torch.randn(4, 1, 8), torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(hal.ContractError, match="rising from 0 to 4"):
        ops.flash_attention(q, q, q, layout="TND", cu_seqlens_q=cu, cu_seqlens_k=cu)


@pytest.mark.parametrize("d", [64, 65, 128, 129, 256])
def test_attention_at_the_edges_of_its_head_sizes(opencl, d):
    q, k, v = (torch.randn(1, 2, n, d) for n in (19, 35, 35))
    actual = gradients(lambda *t: ops.flash_attention(*t, layout="BNSD", next_tokens=0), (q, k, v))
    exact = gradients(
        lambda *t: ops.flash_attention.reference(*t, layout="BNSD", next_tokens=0), (q.double(), k.double(), v.double())
    )
    for a, b in zip(actual, exact):
        assert torch.allclose(a.double(), b, atol=1e-4)


def test_a_mask_that_changes_after_the_forward_pass_is_noticed(opencl):
    q, mask = torch.randn(1, 1, 4, 8, requires_grad=True), torch.zeros(4, 4, dtype=torch.bool)
    y = ops.flash_attention(q, q, q, layout="BNSD", mask=mask)
    mask.fill_(True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_survives_a_copy_and_every_float_is_rounded_as_torch_does(opencl, dtype):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    copied = ops.bias_dropout_add(every, None, torch.zeros(every.shape))
    assert torch.equal(copied.nan_to_num(7e30), every.float().nan_to_num(7e30))
    floats = torch.randn(1 << 14) * torch.logspace(-42, 38, 1 << 14, base=10.0)
    rounded = ops.bias_dropout_add(torch.zeros(floats.shape, dtype=dtype), None, floats.to(dtype))
    assert torch.equal(rounded, floats.to(dtype))
    m, v = torch.zeros_like(floats), torch.zeros_like(floats)
    model, params = torch.empty(floats.shape, dtype=dtype), floats.clone()
    ops.adamw([params], [torch.zeros_like(floats)], [m], [v], step=1, lr=0.0, model_params=[model])
    assert torch.equal(model, floats.to(dtype))


def test_embedding_refuses_ids_outside_of_the_table(opencl):
    with pytest.raises(IndexError, match="ids from 0 to 4 in a table of 4 rows"):
        ops.embedding(torch.ones(4, 3), torch.tensor([0, 4]))


def test_linear_computes_what_is_wanted_and_nothing_else(use):
    backend = use(profile=True)
    x, w = torch.randn(6, 5), torch.randn(4, 5, requires_grad=True)
    ops.linear(x, w).sum().backward()
    backend.synchronize()
    assert backend.kernel_times()["multiply"][0] == 2  # forward, and the weight's gradient


def test_cross_entropy_may_overwrite_its_logits(opencl):
    logits, target = torch.randn(5, 33), torch.randint(0, 33, (5,))
    (expected,) = gradients(lambda x: ops.cross_entropy(x, target), (logits,))
    leaf = logits.clone().requires_grad_()
    inner = leaf * 1.0
    address = inner.data_ptr()
    addresses = []
    inner.register_hook(lambda g: addresses.append(g.data_ptr()))
    torch.manual_seed(0)
    dy = torch.randn(5, dtype=torch.float64).float()
    ops.cross_entropy(inner, target, inplace_backward=True).backward(dy)
    assert addresses == [address]
    assert torch.equal(leaf.grad, expected)
