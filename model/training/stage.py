"""A stage of the GPT as torch's engines see it, the sharding of its parameters (ZeRO), and gradient accumulation, the
schedule of a step's microbatches on one stage.

The sharding is torch.distributed's; this file adapts the GPT to it. pipeline.py has the schedules of several stages.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hal import HalError, Rng
from hal.profiling import phase

from ..config.schema import Config
from ..gpt.dropout_rng import DropoutRng
from ..gpt.model import GPT, TransformerLayer
from ..gpt.moe import MoE
from .microbatches import Microbatch

Loss = Callable[[Tensor, Tensor], Tensor]
"""(what the last stage returns: logits [s, b, v_local], or hidden [s, b, h] with Config.fuses_output_layer; labels
[b, s]) -> the scalar to differentiate."""


class Stage(nn.Module):
    """Stage number `index` of the GPT, with the interface that torch's engines call.

    dropout: the stream of the step's dropout; None = no dropout.
    """

    dropout: Rng | None = None

    def __init__(self, model: GPT, index: int) -> None:
        super().__init__()
        self.model, self.index = model, index

    def forward(self, x: Tensor, sample: Tensor, starts: Tensor | None = None) -> Tensor:
        """x: tokens [b, s] on the first stage, hidden [s, b, h] elsewhere. sample: Microbatch.sample_numbers, a tensor
        because pipelining cuts only tensors into microbatches. starts: as in GPT.forward."""
        dropout_rng, batch = None, self.model.config.global_batch_size
        if self.dropout is not None:
            assert batch is not None
            dropout_rng = DropoutRng(self.dropout, int(sample[0]), batch)
        y: Tensor = self.model(x, dropout_rng, starts=starts, logits=not self.model.config.fuses_output_layer)
        # The zero-bubble schedule detaches the tensors that it sends in place, which torch does not allow for views.
        return y.clone() if y._is_view() and not self.model.last else y


def shard(stage: Stage, mesh: DeviceMesh, experts: DeviceMesh | None, config: Config, zero: int) -> None:
    """Shards the stage's parameters over `mesh`, layer by layer (ZeRO; see ParallelLayout.zero).

    experts: the mesh over which the weights of experts are sharded.

    Parameters become float32, so that the optimizer's shard is the master copy; the layers compute in the config's
    dtype. Gradients are summed in float32, not averaged, because the loss is already that of the global batch.
    """
    # torch warns because in-place changes of such a view would be lost, but there are none here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # The initial values stay rounded to the model's dtype, like those of a replicated model.
    stage.float()
    policy = MixedPrecisionPolicy(
        param_dtype=None if config.params_dtype == torch.float32 else config.params_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
        raise HalError(
            f"ZeRO stage {zero} adds gradients up, and fully_shard of torch {torch.__version__} can only average them; "
            "install torch 2.11 or later, or give neither --zero-stage nor --use-distributed-optimizer"
        )
    layers = list(stage.model.decoder.layers.values())
    inner = [
        layer.mlp.experts for layer in layers if isinstance(layer, TransformerLayer) and isinstance(layer.mlp, MoE)
    ]
    for module in (*inner, *layers, stage):
        # A loss that includes the output layer reads its weight after the stage's forward pass.
        reshard = zero == 3 and not (module is stage and config.fuses_output_layer)
        over = experts if module in inner else mesh
        sharded = fully_shard(module, mesh=over, reshard_after_forward=reshard, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        # Otherwise torch would pass the divisor to the reduction, which gloo does not support.
        sharded.set_force_sum_reduction_for_comms(True)


class GradientAccumulation:
    """Forward and backward of a model without pipeline parallelism, microbatch by microbatch.

    after_first: called between the first microbatch's backward pass and the second's forward pass.
    """

    def __init__(self, stage: Stage, zero: int, after_first: Callable[[], object]) -> None:
        self.stage, self.zero, self.after_first = stage, zero, after_first

    def run(self, microbatches: Sequence[Microbatch], loss: Loss) -> None:
        """The loss of each microbatch, and its gradients if they are enabled."""
        last = len(microbatches) - 1
        for i, m in enumerate(microbatches):
            if isinstance(self.stage, FSDPModule) and torch.is_grad_enabled():
                self._prepare(i == last)
            # The logits must not be assigned to a variable, because they would then stay in memory during the backward
            # pass and the next microbatch's forward pass.
            with phase("forward"):
                value = loss(self.stage(m.tokens, m.sample_numbers(), m.starts), m.labels)
            if torch.is_grad_enabled():
                with phase("backward"):
                    value.backward()  # type: ignore[no-untyped-call]
                if i == 0 and last > 0:
                    self.after_first()
            del value  # frees the rest of the graph before the next forward pass

    def _prepare(self, last: bool) -> None:
        stage: Any = self.stage
        stage.set_is_last_backward(last)
        # ZeRO 1 keeps unsharded gradients until the last microbatch; ZeRO 2 and 3 reduce-scatter them after each one.
        # Only ZeRO 3 shards the weights again between microbatches.
        stage.set_requires_gradient_sync(last or self.zero >= 2)
        stage.set_reshard_after_backward(last or self.zero == 3)
