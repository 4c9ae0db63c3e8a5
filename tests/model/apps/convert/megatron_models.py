"""megatron-core's own GPTModel on the CPU, for tests: created, initialised, run, and saved in its own formats."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import warnings
from pathlib import Path
from typing import Any

import torch
from megatron_core_models import LATENT_FIELDS, core_config, core_spec
from models import TOKENS, VOCABULARY

import hal
from hal.mesh import Layout, Mesh
from hal.model.config.schema import Config, resolve

PADDED = 128
EXPERT_ARGS = """moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk moe_router_score_function
    moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor moe_router_enable_expert_bias
    moe_router_bias_update_rate moe_router_pre_softmax"""


def core_model(config: Config, *, tp: int = 1, pp: int = 1, ep: int = 1, grouped: bool = False) -> Any:
    """This process's part of the GPTModel (local layers) that `config` describes. Needs an initialised world.

    ep: expert-parallel ranks; each of them also has a part of every sequence's data. grouped: --moe-grouped-gemm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        if config.num_experts is not None or config.multi_latent_attention:
            return _with_experts(config, tp, pp, ep, grouped)
        gelu = torch.nn.functional.gelu
        settings = TransformerConfig(
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.ffn_hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_query_groups=config.num_query_groups,
            kv_channels=config.kv_channels,
            normalization=config.normalization,
            layernorm_epsilon=config.norm_epsilon,
            gated_linear_unit=config.swiglu,
            activation_func=torch.nn.functional.silu if config.swiglu else lambda x: gelu(x, approximate="tanh"),
            add_bias_linear=not config.disable_bias_linear,
            use_cpu_initialization=True,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            pipeline_dtype=torch.float32,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            masked_softmax_fusion=False,
        )
        return GPTModel(
            settings,
            get_gpt_layer_local_spec(normalization=config.normalization),
            config.padded_vocab_size,
            config.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=not config.untie_embeddings_and_output_weights,
            position_embedding_type=config.position_embedding_type,
            rotary_base=int(config.rotary_base),
        )


def _with_experts(config: Config, tp: int, pp: int, ep: int, grouped: bool) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import grouped_gemm_util, moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    # Transformer Engine is not installed, and megatron-core uses it without a check in these places.
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    # Grouped experts are created, saved and loaded, but not run, and the package that runs them is not needed.
    grouped_gemm_util.grouped_gemm_is_available = lambda: True
    # Its all-to-all copies sizes to the host on a stream of its own, for which a CPU has no counterpart.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = contextlib.nullcontext()
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = lambda self, point, sizes: sizes
    settings = core_config(
        config,
        layernorm_epsilon=config.norm_epsilon,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
        moe_grouped_gemm=grouped,
        moe_token_dispatcher_type="alltoall",
    )
    return GPTModel(
        settings,
        core_spec(settings),
        config.padded_vocab_size,
        config.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=int(config.rotary_base),
    )


def without_a_gpu() -> None:
    """Prepares this process, which must belong to one test, for megatron-core's forward pass and saving."""
    from megatron.core.tensor_parallel import random as core_random

    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *a: None
    core_random.CudaRNGStatesTracker.fork = lambda self, *a: contextlib.nullcontext()
    multiprocessing.current_process()._config["daemon"] = False  # saving starts child processes


def randomize(model: Any) -> None:
    """Initialises all parameters and buffers randomly; equal shapes in equal order give equal values."""
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            center = 1.0 if "layernorm.weight" in name else 0.0
            p.copy_(center + 0.2 * torch.randn(p.shape, generator=draw))


@torch.no_grad()
def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [b, s, v] of a whole model."""
    s = tokens.shape[1]
    mask = torch.ones(1, 1, s, s, dtype=torch.bool).triu(1)
    positions = torch.arange(s).expand(tokens.shape)
    return model.eval()(tokens, positions, mask).float()


def args_of(config: Config, *, tp: int, pp: int, **more: Any) -> argparse.Namespace:
    """Those of the arguments stored by Megatron's command line in a checkpoint that the model needs."""
    from megatron.core.transformer.enums import AttnBackend

    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    names += ("seq_length", "max_position_embeddings", "position_embedding_type", "normalization", "norm_epsilon")
    names += ("swiglu", "untie_embeddings_and_output_weights", "num_experts", "multi_latent_attention", "qk_layernorm")
    values = {name: getattr(config, name) for name in names}
    if config.num_experts is not None:
        values |= {name: getattr(config, name) for name in EXPERT_ARGS.split()}
        values |= {"moe_layer_freq": eval(config.moe_layer_freq), "moe_router_load_balancing_type": "aux_loss"}
        values |= {"moe_aux_loss_coeff": 0.0, "moe_token_dispatcher_type": "flex"}
    if config.multi_latent_attention:
        values |= {name: getattr(config, name) for name in LATENT_FIELDS.split()}
    values["rotary_base"] = int(config.rotary_base)
    return argparse.Namespace(
        **values,
        group_query_attention=config.num_query_groups != config.num_attention_heads,
        add_bias_linear=not config.disable_bias_linear,
        bias_gelu_fusion=not config.swiglu,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        padded_vocab_size=config.padded_vocab_size,
        params_dtype=torch.float32,
        attention_backend=AttnBackend.auto,
        save=Path("somewhere"),
        tokenizer_type="NullTokenizer",
        vocab_size=100,
        **more,
    )


def _config(options: dict[str, Any]) -> Config:
    config = resolve(options)
    config.set_vocabulary(VOCABULARY)
    assert config.padded_vocab_size == PADDED
    return config


def _core(options: dict[str, Any], layout: dict[str, int], grouped: bool = False) -> Any:
    """layout: sizes of tp, pp and ep; the product is that of the ranks, and each expert is divided over tp."""
    import torch.distributed as dist

    hal.use("cpu_ref")
    tp, ep = layout.get("tp", 1), layout.get("ep", 1)
    Mesh(Layout(tp=tp, dp=ep, pp=layout.get("pp", 1), ep=ep, etp=tp), hal.backend(), timeout=60.0)
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    without_a_gpu()
    return core_model(_config(options), grouped=grouped, **layout)


def _rank_folder() -> str:
    """The name of the folder of this rank's file."""
    from megatron.core import parallel_state as ps

    name = f"mp_rank_{ps.get_tensor_model_parallel_rank():02d}"
    if ps.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{ps.get_pipeline_model_parallel_rank():03d}"
    if ps.get_expert_model_parallel_world_size() > 1:
        name += f"_{ps.get_expert_model_parallel_rank():03d}"
    return name


def _save_ranks(model: Any, args: argparse.Namespace, root: str) -> None:
    """Saves this rank's file as Megatron-LM does."""
    folder = Path(root, "iter_0000012", _rank_folder())
    folder.mkdir(parents=True, exist_ok=True)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 12, "model": model.state_dict_for_save_checkpoint()}
    state["rng_state"] = [{"np_rng_state": __import__("numpy").random.get_state()}]
    torch.save(state, folder / "model_optim_rng.pt")
    Path(root, "latest_checkpointed_iteration.txt").write_text("12")


def save_theirs(options: dict[str, Any], root: str) -> list[Any]:
    """One process: a random GPTModel saved in both of Megatron's formats; its logits."""
    from megatron.core import dist_checkpointing

    model = _core(options, {})
    randomize(model)
    args = args_of(_config(options), tp=1, pp=1)
    _save_ranks(model, args, f"{root}/legacy")
    distributed = Path(root, "distributed", "iter_0000012")
    distributed.mkdir(parents=True)
    tree = {"args": args, "iteration": 12, "model": model.sharded_state_dict()}
    dist_checkpointing.save(tree, str(distributed))
    (Path(root) / "distributed" / "latest_checkpointed_iteration.txt").write_text("12")
    return logits_of(model, TOKENS).tolist()


def save_ranks(options: dict[str, Any], root: str, to: str, layout: dict[str, int], grouped: bool) -> None:
    """One rank: loads the distributed checkpoint of `save_theirs`, and saves its file of a layout."""
    from megatron.core import dist_checkpointing

    model = _core(options, layout, grouped)
    folder = str(Path(root, "distributed", "iter_0000012"))
    model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, folder)["model"], strict=True)
    more = {"expert_model_parallel_size": layout.get("ep", 1), "moe_grouped_gemm": grouped}
    args = args_of(_config(options), tp=layout.get("tp", 1), pp=layout.get("pp", 1), **more)
    _save_ranks(model, args, to)


def load_ours(options: dict[str, Any], root: str, layout: dict[str, int], grouped: bool = False) -> list[Any]:
    """This rank's parameters after loading our legacy and our distributed checkpoint into megatron-core's model."""
    from megatron.core import dist_checkpointing

    model = _core(options, layout, grouped)
    path = Path(root, "legacy", "release", _rank_folder(), "model_optim_rng.pt")
    model.load_state_dict(torch.load(path, weights_only=False)["model"], strict=True)
    loaded = {n: p.clone() for n, p in model.state_dict().items() if p is not None}
    answer = None if set(layout.values()) - {1} or grouped else logits_of(model, TOKENS).tolist()
    randomize(model)
    tree = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(Path(root, "distributed", "release")))
    model.load_state_dict(tree["model"], strict=True)
    return [answer, [n for n, p in model.state_dict().items() if p is not None and not torch.equal(p, loaded[n])]]
