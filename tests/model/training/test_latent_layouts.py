"""Latent attention on two ranks with 16-bit weights, documents within a sequence, and selective recomputation.

test_layouts.py trains it on every layout in float32.
"""

from __future__ import annotations

from typing import Any

import pytest
from parallel_runs import CP2, DOCUMENTS, DROPOUT, LATENT_DENSE, SP, TP2, close, on

SELECTIVE = {"recompute_granularity": "selective"}


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_16_bits_within_their_own_tolerance(dtype: str) -> None:
    """Partial sums are rounded to 8 bits: 2^-8 relative, averaged by the losses. float32 is as close."""
    narrow = {**LATENT_DENSE, dtype: True, "initial_loss_scale": 2.0**10}
    if dtype == "bf16":
        del narrow["initial_loss_scale"]
    one = on(1, narrow, 5)
    close(on(2, {**narrow, **TP2, **SP}, 5), one, 2**-8, 2**-5)
    close(one, on(1, LATENT_DENSE, 5), 2**-8, 2**-5)


@pytest.mark.parametrize(
    "layout", [pytest.param(CP2, marks=pytest.mark.slow), pytest.param({**TP2, **SP}, marks=pytest.mark.nightly)]
)
def test_documents_within_a_sequence_are_told_apart(layout: dict[str, Any]) -> None:
    separate = {**LATENT_DENSE, **DOCUMENTS, "micro_batch_size": 2}
    one = on(1, separate, 5)
    close(on(2, {**separate, **layout}, 5), one, 1e-5, 1e-4)
    assert one != on(1, {**LATENT_DENSE, "micro_batch_size": 2}, 5), "the test needs documents that matter"


@pytest.mark.nightly
def test_selective_recomputation_changes_nothing_bit_for_bit() -> None:
    base = {**LATENT_DENSE, **DROPOUT, **TP2, **SP}
    assert on(2, {**base, **SELECTIVE}, 4) == on(2, base, 4)
