"""The same training run by HAL's thin GPT, in one process, and by megatron-core's GPTModel at any layout.

Both start from the thin model's weights and see the same tokens. Each rank of megatron-core compares the losses, the
gradients of its shards and the gradient norm of every step with those of the whole thin model.
"""

import contextlib
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from model_options import LLAMA_OPTIONS

import hal
from hal.model.apps.convert.megatron_core import to_megatron_core
from hal.model.config.command_line import build
from hal.model.gpt.model import GPT
from hal.model.parallel.tensor_sharding import Shard
from hal.model.training.optimizer import Optimizer

VOCABULARY, LAYERS, LENGTH, MICROBATCHES, LR = 128, 4, 16, 2, 1e-2
EPS = 1e-2  # Adam divides by |gradient| + eps: with a smaller one, rounding errors of zero gradients become steps
GPT2 = {"gelu_approximate": "none"}
LLAMA = {**LLAMA_OPTIONS, "ffn_hidden_size": 48, "num_query_groups": 2}


@dataclass(frozen=True)
class Case:
    """A comparison. spec: "local" (megatron-core's layers), "hal" (HAL's layers, loss and AdamW)."""

    model: str
    spec: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence: bool = False
    cp_comm_type: str = "p2p"
    window: tuple[int, int] | None = None
    steps: int = 3


def thin_config(case):
    """HAL's configuration of the case, for one process."""
    window = {"pre_tokens": case.window[0], "next_tokens": 0} if case.window else {}
    return build(
        {
            "backend": "cpu_ref",
            "tokenizer_type": "NullTokenizer",
            "vocab_size": VOCABULARY - 1,
            "data_path": "unused",
            "num_layers": LAYERS,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "seq_length": LENGTH,
            "micro_batch_size": 2,
            "global_batch_size": 8,  # the layout check needs a multiple of micro_batch_size x world size
            "train_iters": 10,
            "lr": LR,
            "adam_eps": EPS,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "init_method_std": 0.1,
            **(GPT2 if case.model == "gpt2" else LLAMA),
            **window,
        }
    )


def batch(step, number):
    """Tokens and labels [2, s] of a microbatch."""
    draw = torch.Generator().manual_seed(100 * step + number)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=draw)
    return ids[:, :-1], ids[:, 1:]


class Thin:
    """HAL's GPT and its optimizer."""

    def __init__(self, case):
        self.config = thin_config(case)
        self.config.set_vocabulary(VOCABULARY)
        assert self.config.padded_vocab_size == VOCABULARY
        self.model = GPT(self.config, hal.device())
        self.optimizer = Optimizer(self.config, dict(self.model.named_parameters()))

    def step(self, step):
        """Runs one step. Returns (losses of the microbatches, gradients by name, gradient norm)."""
        self.optimizer.zero_grad()
        losses = []
        for number in range(MICROBATCHES):
            tokens, labels = batch(step, number)
            loss = self.model.loss(self.model(tokens), labels)
            (loss / MICROBATCHES).backward()
            losses.append(loss.item())
        grads = {n: p.grad.clone() for n, p in self.model.named_parameters()}
        norm = self.optimizer.grad_norm()
        self.optimizer.step(LR, self.optimizer.clip_factor(norm))
        return losses, grads, float(norm)


def core_config(case, thin):
    """megatron-core's configuration of the same model."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=thin.num_query_groups,
        ffn_hidden_size=thin.ffn_hidden_size,
        gated_linear_unit=thin.swiglu,
        activation_func=torch.nn.functional.silu if thin.swiglu else torch.nn.functional.gelu,
        normalization=thin.normalization,
        add_bias_linear=not thin.disable_bias_linear,
        window_size=case.window,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        context_parallel_size=case.cp,
        sequence_parallel=case.sequence,
        cp_comm_type=case.cp_comm_type if case.cp > 1 else None,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=case.spec == "hal",
        persist_layer_norm=False,
        finalize_model_grads_func=finalize_model_grads,
    )


class Core:
    """megatron-core's GPTModel under its own data-parallel wrapper, schedule and optimizer."""

    def __init__(self, case, thin):
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

        from hal.model.megatron import gpt_block_spec

        self.case, self.config = case, core_config(case, thin.config)
        rms = thin.config.normalization == "RMSNorm"
        local = get_gpt_layer_local_spec(normalization="RMSNorm" if rms else None)
        inner = GPTModel(
            self.config,
            gpt_block_spec(self.config) if case.spec == "hal" else local,
            VOCABULARY,
            LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=not thin.config.untie_embeddings_and_output_weights,
            position_embedding_type=thin.config.position_embedding_type,
        )
        rank = parallel_state.get_pipeline_model_parallel_rank()
        self.first = rank * (LAYERS // case.pp)
        whole = self.mine(dict(thin.model.named_parameters()), thin.model.shards)
        self.names = [n for n, _ in inner.named_parameters()]
        inner.load_state_dict({n: whole[n].detach() for n in self.names}, strict=False)
        self.model = DistributedDataParallel(self.config, DistributedDataParallelConfig(), inner)
        options = OptimizerConfig(
            optimizer="adam",
            lr=LR,
            weight_decay=thin.config.weight_decay,
            adam_beta1=thin.config.adam_beta1,
            adam_beta2=thin.config.adam_beta2,
            adam_eps=thin.config.adam_eps,
            clip_grad=thin.config.clip_grad,
        )
        self.optimizer = get_megatron_optimizer(options, [self.model], get_standard_config_overrides(options))
        for group in self.optimizer.param_groups:
            # As its OptimizerParamScheduler does; without one, weight decay applies to every parameter.
            group["lr"], group["weight_decay"] = LR, options.weight_decay * group["wd_mult"]

    def mine(self, tensors, shards):
        """This rank's shards of a whole thin model's tensors, under megatron-core's names."""
        from megatron.core import parallel_state

        rank, size = parallel_state.get_tensor_model_parallel_rank(), self.case.tp
        last = self.first + LAYERS // self.case.pp
        local_tensors = {}
        for name, tensor in tensors.items():
            layer = int(name.split(".")[2]) if name.startswith("decoder.layers.") else None
            if layer is None or self.first <= layer < last:
                local_tensors[name] = shards.get(name, Shard(0)).slice(tensor, rank, size) if name in shards else tensor
        core_tensors = to_megatron_core(local_tensors, first_layer=self.first)
        if "output_layer.weight" not in core_tensors:  # a last stage holds its own copy of a tied weight
            core_tensors["output_layer.weight"] = core_tensors["embedding.word_embeddings.weight"]
        return core_tensors

    def step(self, step):
        """(losses, gradients by megatron-core's names, gradient norm) of this rank."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

        rows = slice(None)
        if self.case.cp > 1:
            from hal.model.parallel.sequence_shard import SequenceShard

            rows = SequenceShard.zigzag(LENGTH, parallel_state.get_context_parallel_rank(), self.case.cp).positions()

        def forward(numbers, model):
            tokens, labels = (x[:, rows] for x in batch(step, next(numbers)))
            positions = torch.arange(LENGTH)[rows].expand(2, -1)
            mask = None
            if self.case.spec == "local":
                mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
            output = model(tokens, positions, mask, labels=labels)

            def loss(losses):
                mean = losses.float().mean()
                whole = mean.detach().clone()
                if self.case.cp > 1:
                    dist.all_reduce(whole, group=parallel_state.get_context_parallel_group())
                # This rank's share of the mean; the schedule multiplies by cp, the average of gradients divides by it.
                return mean / self.case.cp, {"loss": (whole / self.case.cp).item()}

            return output, loss

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(range(MICROBATCHES)),
            model=self.model,
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        grads = {n: p.main_grad.clone() for n, p in self.model.module.named_parameters()}
        _, norm, _ = self.optimizer.step()
        return [f["loss"] for f in outputs], grads, norm


def compare(case, pass_on=None):
    """This rank's worst relative errors {"loss", "grad", "norm"} over all steps, and how many losses it had."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from hal.model.megatron import hal_device, hal_ops

    worst = {"loss": 0.0, "grad": 0.0, "norm": 0.0, "losses": 0}
    with hal_device(), hal_ops() if case.spec == "hal" else contextlib.nullcontext():
        parallel_state.initialize_model_parallel(case.tp, case.pp, context_parallel_size=case.cp)
        model_parallel_cuda_manual_seed(1)
        thin = Thin(case)
        core = Core(case, thin)
        for step in range(case.steps):
            losses, grads, norm = thin.step(step)
            core_losses, core_grads, core_norm = core.step(step)
            expected = core.mine(grads, thin.model.shards)
            for a, b in zip(core_losses, losses, strict=bool(core_losses)):
                worst["loss"] = worse(worst["loss"], abs(a - b) / abs(b))
                worst["losses"] += 1
            for name, grad in core_grads.items():
                # Relative to the whole gradient: the gradient of a key bias, for one, is only rounding error.
                worst["grad"] = worse(worst["grad"], (grad - expected[name]).norm().item() / norm)
            worst["norm"] = worse(worst["norm"], abs(core_norm - norm) / norm)
        parallel_state.destroy_model_parallel()
    return worst


def worse(worst, error):
    """The larger of the two; NaN counts as infinitely large."""
    return max(worst, error) if math.isfinite(error) else math.inf


def rank_of(case):
    """`compare` on a rank of a launched world."""
    hal.use("cpu_ref")
    hal.backend().comm()
    return compare(case)
