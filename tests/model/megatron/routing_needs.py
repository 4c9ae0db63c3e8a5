"""The use of each routed name: code of megatron-core that needs it, with a check of the result."""

from unittest import mock

import torch


def forward_with_a_memory_buffer():
    from megatron.core.utils import GlobalMemoryBuffer

    assert GlobalMemoryBuffer().get_tensor((2, 3), torch.float32, "x").device.type == "cpu"


def timers():
    from megatron.core.timers import Timer

    timer = Timer("t")
    timer.start()
    timer.stop()
    assert timer.elapsed(reset=False) >= 0


def seeded_tracker():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    tracker.add("a", 5)
    return tracker


def a_tracked_stream_starts_at_its_seed():
    before = torch.get_rng_state()
    tracker = seeded_tracker()
    assert torch.equal(tracker.get_states()["a"], torch.Generator().manual_seed(5).get_state())
    assert torch.equal(torch.get_rng_state(), before)


def a_fork_draws_from_its_own_stream():
    tracker, before = seeded_tracker(), torch.get_rng_state()
    with tracker.fork("a"):
        numbers = torch.rand(3)
    assert torch.equal(numbers, torch.rand(3, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(torch.get_rng_state(), before)


def a_step_run_again_draws_the_same():
    from megatron.core.rerun_state_machine import RerunStateMachine

    machine = RerunStateMachine()
    machine._save_state()
    state = torch.cuda.get_rng_state()
    numbers = torch.rand(3)
    with mock.patch.object(torch, "set_rng_state"):  # on the host it is the same generator
        machine._restore_state()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.equal(torch.rand(3), numbers)


def grad_scaler():
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler

    assert ConstantGradScaler(4.0).scale.item() == 4.0


def _parameters():
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.full((4,), 3.0)
    return [parameter]


def count_zeros():
    from megatron.core.optimizer.clip_grads import count_zeros_fp32

    assert count_zeros_fp32(_parameters(), torch.distributed.group.WORLD) == 0


def clip_by_norm():
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    parameters = _parameters()
    clip_grad_by_total_norm_fp32(parameters, 3.0, 6.0)
    assert torch.allclose(parameters[0].grad, torch.full((4,), 1.5))


def default_causal_mask():
    from megatron.core.transformer.utils import get_default_causal_mask

    assert get_default_causal_mask(2).tolist() == [[False, True], [False, False]]


def _shard(data):
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    shard = ShardedTensor.from_rank_offsets("w", torch.zeros(3))
    shard.data = data
    return shard


def parallel_load_of_a_shard_without_data():
    shard = _shard(None)
    shard.init_data("cuda")
    assert shard.data.device.type == "cpu"


def parallel_load_of_a_shard():
    from megatron.core.dist_checkpointing import exchange_utils

    buffer, _ = exchange_utils._get_empty_tensor_for_exchange("s", {"s": _shard(torch.zeros(3))}, {}, {})
    assert buffer.shape == (3,)


def broadcast_data():
    from megatron.core.tensor_parallel.data import broadcast_data

    given = {"x": torch.arange(6).view(2, 3)}
    assert torch.equal(broadcast_data(["x"], given, torch.int64)["x"], given["x"])


def gather_of_a_matrix():
    from megatron.core.tensor_parallel.utils import gather_split_1d_tensor

    assert gather_split_1d_tensor(torch.ones(2, 4), torch.distributed.group.WORLD).shape == (8,)


NEEDED_BY = {
    "torch.cuda.current_device": forward_with_a_memory_buffer,
    "torch.cuda.synchronize": timers,
    "torch.cuda.get_rng_state": a_tracked_stream_starts_at_its_seed,
    "torch.cuda.random.get_rng_state": a_fork_draws_from_its_own_stream,
    "torch.cuda.set_rng_state": a_step_run_again_draws_the_same,
    "torch.cuda.manual_seed": a_tracked_stream_starts_at_its_seed,
    "torch.cuda.default_generators": a_fork_draws_from_its_own_stream,
    "torch.cuda._lazy_call": a_fork_draws_from_its_own_stream,
    "torch.tensor": grad_scaler,
    "torch.zeros": count_zeros,
    "torch.ones": default_causal_mask,
    "torch.empty": parallel_load_of_a_shard_without_data,
    "torch.empty_like": parallel_load_of_a_shard,
    "torch.Tensor.cuda": broadcast_data,
    "torch.Tensor.type": clip_by_norm,
    "torch.distributed.all_gather_into_tensor": gather_of_a_matrix,
}
