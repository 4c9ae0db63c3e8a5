"""The growth of the batch and the number of iterations against megatron-core's calculator."""

import pytest

from hal.model.config.sample_schedule import batch_size, batch_sizes, iterations
from hal.model.config.schema import Config


@pytest.mark.parametrize("ramp, size", [((2, 2, 60), 8), ((4, 4, 7), 16), ((3, 1, 100), 6), ((8, 2, 50), 8)])
def test_the_batch_grows_as_in_megatron(ramp, size):
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    c = Config(global_batch_size=size, micro_batch_size=1, rampup_batch_size=tuple(map(str, ramp)))
    if ramp[0] == size:  # Megatron divides by zero increments
        assert {batch_size(c, n) for n in range(100)} == {size}
        return
    theirs = RampupBatchsizeNumMicroBatchesCalculator(size, 1, 1, False, 0, *ramp)
    for consumed in range(150):
        theirs.update(consumed, consistency_check=False)
        if consumed != ramp[2]:  # exactly at the end Megatron's division may round to one increment too many
            assert batch_size(c, consumed) == theirs.get_current_global_batch_size()
    assert {batch_size(c, n) for n in range(150)} <= set(batch_sizes(c))


def test_the_batch_follows_a_schedule_in_tokens():
    """Megatron-LM core_v0.18.2's StepBatchsizeNumMicroBatchesCalculator gives these."""
    words = ("0:4", "0.96K:6,1600:12")
    c = Config(seq_length=16, micro_batch_size=2, step_batch_size_schedule=words, train_samples=200)
    assert c.global_batch_size == 12 and batch_sizes(c) == [4, 6, 12]
    assert [batch_size(c, n) for n in (0, 59, 60, 99, 100, 5000)] == [4, 4, 6, 6, 12, 12]
    consumed = steps = 0
    while consumed < 200:
        consumed, steps = consumed + batch_size(c, consumed), steps + 1
    assert c.train_iters == steps == 15 + 7 + 9
    assert iterations(c, 30) == 8 and iterations(c, 0) == 0, "the last batch is filled up"


def test_iterations_of_a_run_in_samples():
    assert iterations(Config(global_batch_size=4, micro_batch_size=1), 25) == 6
    ramp = Config(global_batch_size=4, micro_batch_size=1, rampup_batch_size=("2", "2", "4"))
    sizes = [2, 2, 4]  # the ramp ends with the first step after 4 samples
    assert iterations(ramp, 25) == len(sizes) + (25 - sum(sizes)) // 4
