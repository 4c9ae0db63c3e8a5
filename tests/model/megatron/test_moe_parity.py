"""Losses (relative 1e-5) and gradient norms (relative 1e-4) of 20 steps agree between HAL's trainer and megatron-core's
GPTModel, for mixtures of experts and latent attention."""

from __future__ import annotations

import contextlib
from typing import Any

import parallel_runs
import pytest
import torch
from megatron_core_models import core_config, core_spec
from model_options import LATENT_OPTIONS
from parallel_runs import Tokens, trainer

from hal.model.apps.convert.megatron_core import from_megatron_core, to_megatron_core

COMMON = {
    "num_layers": 3,
    "moe_z_loss_coeff": 0.01,
    "adam_eps": 1e-2,  # with a smaller one, Adam makes rounding noise of zero gradients into full steps
    "global_batch_size": 4,
    "micro_batch_size": 2,
}
MIXTRAL = {**parallel_runs.MIXTRAL, **COMMON}
DEEPSEEK = {
    **parallel_runs.DEEPSEEK,
    **COMMON,
    "moe_layer_freq": "[0]+[1]*2",
    "moe_router_load_balancing_type": ("seq_aux_loss", "aux_loss"),
    "moe_aux_loss_coeff": ("0.05", "0.02"),
    "moe_router_dtype": "fp32",
}
DENSE = {**parallel_runs.LLAMA, **COMMON, "moe_z_loss_coeff": None, **LATENT_OPTIONS}
PLAIN = {"q_lora_rank": None, "qk_layernorm": False, "rope_type": "rope", "rotary_scaling_factor": 1.0}
GELU = {"swiglu": False, "gelu_approximate": "none", "moe_router_topk": 1, "moe_router_pre_softmax": True}
# Without --moe-token-drop-policy position, for which megatron-core calls topk on a mask of zeros and ones: which of the
# equal elements torch.topk chooses is unspecified.
CASES: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK,
    "deepseek-latent": {**DEEPSEEK, **LATENT_OPTIONS},
    "latent": DENSE,
    "latent-plain": {**DENSE, **PLAIN, "mscale_all_dim": 0.0, "rotary_base": 1000.0},
    "latent-learned": {**DENSE, "position_embedding_type": "learned_absolute"},
    "gelu-top1": {**MIXTRAL, **GELU},
    "global": {**MIXTRAL, "moe_router_load_balancing_type": ("global_aux_loss",)},
    "dropping": {**MIXTRAL, "moe_expert_capacity_factor": 0.8},
    "padded": {**MIXTRAL, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "sinkhorn": {**MIXTRAL, "moe_router_load_balancing_type": ("sinkhorn",), "moe_aux_loss_coeff": ("0.0",)},
}
QUICK = {"mixtral", "deepseek", "deepseek-latent", "dropping"}


def core_losses(run: Any, dispatcher: str, steps: int) -> tuple[list[float], list[float], list[torch.Tensor]]:
    """(losses, gradient norms, expert biases at the end) of megatron-core, from the same weights on the same data."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    c = run.config
    config = core_config(c, moe_token_dispatcher_type=dispatcher)
    inner = GPTModel(
        config,
        core_spec(config),
        c.padded_vocab_size,
        c.seq_length,
        share_embeddings_and_output_weights=False,
        position_embedding_type=c.position_embedding_type,
    )
    ours = {name: t.clone() for name, t in run.model.state_dict().items()}
    inner.load_state_dict(to_megatron_core(ours), strict=True)
    back = from_megatron_core(inner.state_dict())
    assert back.keys() == ours.keys() and all(torch.equal(back[name], ours[name]) for name in ours)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), inner)
    options = OptimizerConfig(
        optimizer="adam", lr=c.lr, weight_decay=c.weight_decay, adam_eps=c.adam_eps, clip_grad=c.clip_grad
    )
    options.adam_beta1, options.adam_beta2 = c.adam_beta1, c.adam_beta2
    optimizer = get_megatron_optimizer(options, [model], get_standard_config_overrides(options))
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = c.lr, options.weight_decay * group["wd_mult"]
    data, mask = Tokens(c.seq_length, False), torch.ones(c.seq_length, c.seq_length, dtype=torch.bool).triu(1)
    b, losses, norms = c.micro_batch_size, [], []

    def forward(numbers: Any, model: Any) -> Any:
        samples = [data[n] for n in next(numbers)]
        tokens, labels = (torch.stack([s[key] for s in samples]) for key in ("tokens", "labels"))
        positions = torch.arange(c.seq_length).expand(b, -1)
        return model(tokens, positions, mask[None, None], labels=labels), lambda x: (
            x.mean(),
            {"loss": x.mean().item()},
        )

    for step in range(steps):
        first = step * c.global_batch_size
        numbers = [range(first + i, first + i + b) for i in range(0, c.global_batch_size, b)]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        outputs = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(numbers),
            model=model,
            num_microbatches=len(numbers),
            seq_length=c.seq_length,
            micro_batch_size=b,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        losses.append(sum(o["loss"] for o in outputs) / len(outputs))
        norms.append(norm)
    return losses, norms, [x for n, x in inner.named_buffers() if n.endswith("expert_bias")]


def _cases() -> list[Any]:
    pairs = [(name, "alltoall") for name in CASES] + [("mixtral", "allgather")]
    return [
        pytest.param(n, d, id=f"{n}-{d}", marks=() if n in QUICK and d == "alltoall" else pytest.mark.slow)
        for n, d in pairs
    ]


@pytest.mark.parametrize("name, dispatcher", _cases())
def test_losses_of_20_steps(name: str, dispatcher: str, world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from hal.model.megatron import hal_device

    # Transformer Engine is not installed, and megatron-core's router looks its product up without a check.
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)  # True even without the package
    # Its all-to-all copies sizes to the host on a stream of its own, for which a CPU has no counterpart.
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", contextlib.nullcontext())
    monkeypatch.setattr(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", lambda self, point, sizes: sizes)
    parallel_state.destroy_model_parallel()
    with hal_device():
        parallel_state.initialize_model_parallel(1, 1)
        model_parallel_cuda_manual_seed(1)
        run = trainer(CASES[name])
        losses, norms, biases = core_losses(run, dispatcher, 20)
        parallel_state.destroy_model_parallel()
    results = [run.step() for _ in range(20)]
    assert [r.loss for r in results] == pytest.approx(losses, rel=1e-5)
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=1e-4)
    mine = [r.expert_bias for r in run.expert_load.routers.values() if r.expert_bias is not None]
    assert len(mine) == len(biases)
    for bias, right in zip(mine, biases):
        assert torch.equal(bias, right) and bias.any()
    report = results[-1].experts
    if report is None:
        assert run.config.num_experts is None
    else:
        assert (report.dropped > 0.01) == (name in ("dropping", "padded"))
