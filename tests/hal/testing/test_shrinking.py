"""A failing edge case is reported with the smallest sizes that fail."""

import dataclasses

import pytest
import torch
from planted import plant

from hal import Rng, Sample, TensorSpec, ops
from hal.testing import kit, run
from hal.testing.shrinking import shrink


def shapes(sample):
    return [spec.shape for spec in sample.args if isinstance(spec, TensorSpec)]


def test_sizes_that_belong_together_are_reduced_together():
    sample = Sample((TensorSpec((300, 12)), TensorSpec((12,))))
    asked = []

    def fails(candidate):
        asked.append(shapes(candidate))
        return candidate.args[0].shape[0] > 7

    assert shapes(shrink(ops.rms_norm, sample, torch.float32, fails)) == [(8, 1), (1,)]
    assert all(x[1] == weight[0] for x, weight in asked)


def test_indices_stay_below_the_size_that_they_index():
    target = TensorSpec((3,), "int", high=1031, dtype=torch.int64)
    sample = Sample((TensorSpec((3, 1031)), target))
    small = shrink(ops.cross_entropy, sample, torch.float32, lambda s: s.args[0].shape[1] >= 40)
    assert shapes(small) == [(1, 40), (1,)] and small.args[1].high == 40


def test_numbers_of_heads_follow_and_invalid_calls_are_not_asked():
    x = TensorSpec((6, 2, 32))
    sample = Sample((x, x, x), {"layout": "SBH", "num_heads": 4})
    small = shrink(ops.flash_attention, sample, torch.float32, lambda s: s.kwargs["num_heads"] >= 2)
    assert small.kwargs["num_heads"] == 2 and shapes(small)[0] == (1, 2, 2)


def test_calls_with_explicit_values_are_left_alone():
    sample = Sample((TensorSpec((1, 4), "values", values=(1.0, 2.0, 3.0, 4.0)), TensorSpec((4,))))
    assert shrink(ops.rms_norm, sample, torch.float32, lambda s: True) is sample


def test_blocks_of_a_draw_keep_their_shape_if_the_block_would_not_fit():
    sample = Sample((TensorSpec((3, 2, 10)), 0.5, Rng(1).block((6, 4, 20), (2, 1, 5))))
    small = shrink(ops.dropout, sample, torch.float32, lambda s: s.args[0].shape[0] == 3)
    assert small.args[0].shape == (3, 1, 1)


@pytest.mark.slow
def test_the_kit_reports_the_smallest_size_of_an_edge_case():
    def wrong_from_row_7_on(x, weight, eps):
        y = ops.rms_norm.reference(x, weight, eps)
        return torch.cat([y[:7], 2 * y[7:]]) if y.ndim == 2 and y.shape[0] > 100 else y

    report = run(plant(ops.rms_norm, wrong_from_row_7_on), ops=["rms_norm"], examples=0, dtypes=[torch.float32])
    (row,) = (r for r in report.failed if r.implementation == "planted/wrong")
    assert "TensorSpec((101, 1))" in row.code


def test_quick_makes_at_least_one_call_per_row_and_stops_in_time(monkeypatch):
    monkeypatch.setattr(kit, "QUICK_SECONDS", 0.0)
    calls = []
    report = run(
        plant(ops.rms_norm, ops.rms_norm.reference),
        ops=["rms_norm"],
        quick=True,
        on_call=lambda row, count: calls.append((row, count)),
    )
    assert {row.samples for row in report.rows} == {1} and [count for _, count in calls] == [0, 1] * 3
    assert calls[1] == ("rms_norm float32 planted/wrong", 1)
    effort = dataclasses.replace(kit.Effort(examples=2), seconds=None)
    backend = plant(ops.rms_norm, ops.rms_norm.reference)
    row = kit.check_dtype(backend, backend.impls["rms_norm"][0], torch.float32, effort)
    assert row.samples > 10
