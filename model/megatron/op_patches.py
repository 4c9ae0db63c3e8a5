"""hal_ops(): HAL's ops for parts that megatron-core does not build from a spec: final norm, loss, weight gradient
accumulation, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hal import HalError, ops

from .guards import core, replaced
from .process_groups import comm_of


@contextlib.contextmanager
def hal_ops() -> Iterator[None]:
    """While the block runs, models and optimizers that megatron-core builds use HAL's final norm, HAL's cross entropy
    over the sharded vocabulary (fused or not) and HAL's fused AdamW, and `gradient_accumulation_fusion` works with
    HAL's linear_wgrad (megatron-core's own needs Apex).

    The patches are reverted on exit. A model built inside keeps its norm, and an optimizer its step; backward passes
    with gradient_accumulation_fusion must run inside.
    """
    from .core_layers import HalNorm

    block, optimizer, linear = core("transformer.transformer_block"), core("optimizer"), core("tensor_parallel.layers")
    language = core("models.common.language_module.language_module")
    with replaced(
        {
            (block, "LayerNormImpl"): HalNorm,
            (language, "fused_vocab_parallel_cross_entropy"): cross_entropy,
            (language.tensor_parallel, "vocab_parallel_cross_entropy"): cross_entropy,
            (linear, "_grad_accum_fusion_available"): True,
            (linear, "fused_weight_gradient_mlp_cuda"): WeightGradients,
            (optimizer, "Adam"): HalAdam,
            (optimizer, "USING_PYTORCH_OPTIMIZER"): False,
        }
    ):
        yield


def cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any = None, *args: Any, label_smoothing: float = 0.0
) -> Tensor:
    """Loss per token [s, b], float32, of logits [s, b, v_local] whose vocabulary is sharded over the group."""
    if isinstance(tp_group, float):  # vocab_parallel_cross_entropy's third parameter
        tp_group, label_smoothing = None, tp_group
    group = core("parallel_state").get_tensor_model_parallel_group() if tp_group is None else tp_group
    start = group.rank() * vocab_parallel_logits.shape[-1]
    loss: Tensor = ops.cross_entropy(
        vocab_parallel_logits, target, label_smoothing=label_smoothing, vocab_start=start, comm=comm_of(group)
    )
    return loss


class WeightGradients:
    """Replaces Apex's fused_weight_gradient_mlp_cuda: adds the gradient dy^T x to main_grad [out, in] in place.

    x [rows, in] and dy [rows, out] have the same dtype; main_grad is float32, or in ..._fp16 of that dtype.
    """

    @staticmethod
    def wgrad_gemm_accum_fp32(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
        ops.linear_wgrad(x, dy, main_grad)

    @staticmethod
    def wgrad_gemm_accum_fp16(x: Tensor, dy: Tensor, main_grad: Tensor) -> None:
        main_grad += ops.linear(dy.t(), x.t())


class HalAdam(torch.optim.AdamW):
    """torch's AdamW with HAL's op as its step. The state is torch's, so that checkpoints are interchangeable.

    Raises HalError for coupled weight decay, amsgrad and maximize, which HAL's op does not have.
    """

    def __init__(self, params: Any, *args: Any, adam_w_mode: bool = True, **kwargs: Any) -> None:
        if not adam_w_mode:
            raise HalError("HAL's optimizer is AdamW; it does not support coupled weight decay (adam_w_mode=False)")
        super().__init__(params, *args, **kwargs)
        for name in ("amsgrad", "maximize"):
            if self.defaults[name]:
                raise HalError(f"HAL's AdamW does not support {name}; leave it out")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise HalError("HAL's AdamW does not support a closure")
        for group in self.param_groups:
            # The op takes one step number. Parameters that had no gradient in some step have a smaller one.
            by_step: dict[int, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state.setdefault("exp_avg", torch.zeros_like(p))
                state.setdefault("exp_avg_sq", torch.zeros_like(p))
                state["step"] = torch.as_tensor(state.get("step", 0.0), dtype=torch.float32) + 1
                by_step.setdefault(int(state["step"].item()), []).append(p)
            for number, parameters in by_step.items():
                ops.adamw(
                    [p.data for p in parameters],
                    [p.grad for p in parameters if p.grad is not None],
                    [self.state[p]["exp_avg"] for p in parameters],
                    [self.state[p]["exp_avg_sq"] for p in parameters],
                    step=number,
                    lr=float(group["lr"]),
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    eps=group["eps"],
                    weight_decay=group["weight_decay"],
                )
