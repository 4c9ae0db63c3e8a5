"""The hints beside a wrong result: where it is wrong, by which factor, and which known mistake gives it."""

import pytest
import torch
from planted import plant, verdict

from hal import ops
from hal.testing import hints


def pattern(wrong, y=None, exact=None):
    y = torch.zeros(wrong.shape) if y is None else y
    return list(hints.pattern(wrong, y, torch.ones(wrong.shape, dtype=torch.float64) if exact is None else exact))


def test_places_are_described_by_dimension():
    wrong = torch.zeros(6, 9, dtype=torch.bool)
    wrong[4:, 3] = True
    assert pattern(wrong)[:2] == [
        "all wrong elements have an index of at least 4 in dimension 0 (of size 6)",
        "all wrong elements have index 3 in dimension 1 (of size 9)",
    ]
    wrong = torch.zeros(20, dtype=torch.bool)
    wrong[5:12] = True
    assert pattern(wrong)[0] == "all wrong elements have an index of 5 to 11 in dimension 0 (of size 20)"


def test_scattered_errors_have_no_place():
    assert pattern(torch.tensor([True, False] * 10), torch.randn(20), torch.randn(20).double()) == []


def test_a_factor_is_named():
    exact = torch.randn(64, dtype=torch.float64)
    wrong = torch.ones(64, dtype=torch.bool)
    assert pattern(wrong, 0.9 * exact, exact) == ["wrong elements are 0.9 times what they should be"]
    assert pattern(wrong, exact + torch.randn(64), exact) == []


def reference_with(op, **changes):
    """The op's reference, called with other values of the parameters that have these defaults."""
    return lambda **arguments: op.reference(**{**arguments, **{n: f(arguments) for n, f in changes.items()}})


def one_key_more(a):
    return None if a["next_tokens"] is None else a["next_tokens"] + 1


def modulo(x, a):
    heads, kv_heads = a["q"].shape[1], a["k"].shape[1]
    return x if a["layout"] != "BNSD" else x[:, torch.arange(heads) % kv_heads]


MISTAKES = [
    pytest.param(
        *(ops.flash_attention, {"next_tokens": one_key_more}, "a window that is one key too wide to the right"),
        marks=pytest.mark.slow,
    ),
    pytest.param(ops.flash_attention, {"scale": lambda a: 1.0}, "scale=1", marks=pytest.mark.nightly),
    (ops.scale_mask_softmax, {"causal": lambda a: False}, "a call that is not causal"),
    (ops.swiglu, {"bias": lambda a: None}, "a call without the bias"),
    (ops.swiglu, {"x": lambda a: a["x"].roll(a["x"].shape[-1] // 2, -1)}, "exchanged halves"),
    (ops.rotary, {"sin": lambda a: -a["sin"]}, "a rotation in the other direction"),
    (ops.rotary, {"interleaved": lambda a: not a["interleaved"]}, "the other pairing of channels"),
    (ops.adamw, {"step": lambda a: max(1, a["step"] - 1)}, "step - 1"),
    (ops.cross_entropy, {"label_smoothing": lambda a: 0.0}, "label_smoothing=0"),
]


@pytest.mark.parametrize("op, changes, text", MISTAKES)
def test_a_known_mistake_is_named(op, changes, text):
    report, messages = verdict(plant(op, reference_with(op, **changes)), op, examples=0)
    assert not report.ok
    assert f"Hint: the result is that of {text}" in messages or f"; the result is that of {text}" in messages, messages


@pytest.mark.nightly
def test_heads_that_are_assigned_modulo_are_named():
    def wrong(**a):
        grouped = a["layout"] == "BNSD" and a["k"].shape[1] not in (1, a["q"].shape[1])
        k, v = (modulo(a[n], a) for n in ("k", "v")) if grouped else (a["k"], a["v"])
        return ops.flash_attention.reference(**{**a, "k": k, "v": v, **({"num_kv_heads": None} if grouped else {})})

    _, messages = verdict(plant(ops.flash_attention, wrong), ops.flash_attention, examples=0)
    assert "query head h with key/value head h modulo their number" in messages, messages


def test_dropout_that_is_not_rescaled_is_named():
    def unscaled(x, p, rng):
        return ops.dropout.reference(x, p, rng) * (1 - p)

    _, messages = verdict(plant(ops.dropout, unscaled), ops.dropout, examples=20)
    assert "the result is that of a call that does not divide by 1 - p" in messages


def test_elements_that_are_zero_are_called_zero():
    y, exact = torch.zeros(8), -torch.ones(8)
    assert list(hints.pattern(torch.ones(8, dtype=torch.bool), y, exact)) == ["wrong elements are 0"]
