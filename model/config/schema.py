"""The schema of a training run: every option with its Megatron name, default and meaning.

The command line, YAML files and the environment are read into `GivenOptions` (command_line.py). `resolve` turns these
into a `Config`, in which every default that follows from other options is filled in, so that no such field is None.
validation.py finds contradictions between options.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from hal import HalError

from . import linear_attention
from .experts import BALANCING, layer_pattern
from .sample_schedule import full_batch_size, iterations


class ConfigError(HalError):
    """The options of a run are wrong: unknown, of the wrong type, ignored, or contradicting each other.

    kind: a key of PROBLEMS, by which several problems are grouped into one report; problems: those of a report.
    """

    def __init__(self, text: str, kind: str = "wrong") -> None:
        super().__init__(text)
        self.text, self.kind = text, kind
        self.problems: tuple[ConfigError, ...] = (self,)


PROBLEMS = {
    "unknown": "unknown",
    "refused": "cannot be followed, since results would differ or something is missing",
    "wrong": "wrong values and contradictions",
}
"""Headings of a report, by ConfigError.kind, in the order of the report."""


def report(problems: Sequence[ConfigError]) -> ConfigError:
    """One error for all of `problems`; a single one is returned as it is."""
    if len(problems) == 1:
        return problems[0]
    lines = [f"{len(problems)} problems with the options"]
    for kind, heading in PROBLEMS.items():
        texts = dict.fromkeys(p.text for p in problems if p.kind == kind)
        lines += [f"{heading}:", *(f"  {text}" for text in texts)] if texts else []
    error = ConfigError("\n".join(lines))
    error.problems = tuple(problems)
    return error


@contextlib.contextmanager
def collecting(problems: list[ConfigError]) -> Iterator[None]:
    """Adds the problems of a ConfigError that is raised inside to `problems`, and continues after the block."""
    try:
        yield
    except ConfigError as error:
        problems += error.problems


READY = Path(__file__).with_name("presets")
"""Folder of the ready configurations: one NAME.yaml each, with options by name."""


def ready_configuration(name: str) -> Path:
    """The file of the ready configuration `name`, e.g. "llama-70b". Raises ConfigError that lists the names."""
    path = READY / f"{name}.yaml"
    if Path(name).name != name or not path.is_file():
        names = ", ".join(sorted(p.stem for p in READY.glob("*.yaml")))
        raise ConfigError(
            f"no ready configuration is called '{name}'; there are: {names} (a file is given as FILE.yaml)"
        )
    return path


BOUNDS: dict[str, Callable[[float], bool]] = {
    "> 0": lambda x: x > 0,
    ">= 0": lambda x: x >= 0,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in [0, 1]": lambda x: 0 <= x <= 1,
    "in (0, 1]": lambda x: 0 < x <= 1,
    "in 0..4294967295": lambda x: 0 <= x < 2**32,
    "in 0..2": lambda x: 0 <= x <= 2,
    "in 0..3": lambda x: 0 <= x <= 3,
    "in 1..65536": lambda x: 1 <= x <= 1 << 16,
    "in 1..100000": lambda x: 1 <= x <= 100_000,
    "in 1..1048576": lambda x: 1 <= x <= 1 << 20,
    "in 1..4194304": lambda x: 1 <= x <= 1 << 22,
    "in 1..2147483647": lambda x: 1 <= x < 2**31,
    "in 0..100000": lambda x: 0 <= x <= 100_000,
    "in -2147483648..2147483647": lambda x: -(2**31) <= x < 2**31,
    "any integer": lambda x: True,
}
"""Bounds of numeric options: the text of the error message, and the predicate. Those of a model's sizes are chosen such
that the bytes of its largest tensor are an int64."""


TOKENIZERS = (
    "ByteTokenizer",
    "GPT2BPETokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "HuggingFaceTokenizer",
    "WhitespaceTokenizer",
    "NullTokenizer",
)
"""Values of --tokenizer-type; see tokenizer_options.KINDS."""


def _opt(
    default: Any,
    help: str,
    bounds: str = "> 0",
    *,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    no: str = "",
    words: bool = False,
    rule: Callable[[Config], Any] | None = None,
) -> Any:
    """A field. bounds: a key of BOUNDS; aliases: other spellings of the flag; no: name of the flag that sets False;
    words: the flag takes several words; rule: see `_derived`."""
    meta = {
        "help": help,
        "bounds": bounds,
        "choices": choices,
        "aliases": aliases,
        "no": no,
        "words": words,
        "rule": rule,
    }
    return field(default=default, metadata=meta)


def _derived(rule: Callable[[Config], Any], help: str, bounds: str = "> 0", choices: tuple[str, ...] = ()) -> Any:
    """A field whose default follows from other options: if the user gave no value, Config computes it by `rule`.

    The field is annotated with its type after resolution. Rules can run in any order: one that reads another derived
    field applies that field's rule while it is None.
    """
    return _opt(None, help, bounds, choices=choices, rule=rule)


def _default_ffn_hidden_size(c: Config) -> int:
    # Megatron's rule keeps the parameter count of a gated MLP near that of a plain one.
    return max(64, c.hidden_size * 8 // 3 // 64 * 64) if c.swiglu or c.geglu else 4 * c.hidden_size


@dataclass
class Config:
    """All options of a run, resolved. Field names are the flags with underscores.

    None in a field means that the option is absent (no --save, no --exit-interval), because construction fills in the
    defaults that follow from other options. origins: where each option of `given` was set, by name; notes: messages
    about given values that have no effect; noted: accepted options of other trainers without effect, with the reason.
    """

    # execution
    backend: str | None = _opt(None, "backend that runs the operations (cpu_ref, cuda, npu, or a plug-in's name)")
    simulate: bool = _opt(False, "run the backend on its simulator instead of its device")
    fallback: str = _opt(
        "error", "what to do with a call that no implementation accepts", choices=("error", "reference")
    )
    pin: tuple[str, ...] = _opt((), "OP=IMPLEMENTATION: use only this implementation for the op; may be repeated")
    deterministic_mode: bool = _opt(False, "refuse implementations and backends whose equal runs differ in bits")
    rng: str = _opt(
        "hal",
        "random numbers of dropout: hal's, which are equal on every backend and layout, or the vendor's (npu)",
        choices=("hal", "vendor"),
    )
    run_dir: str | None = _opt(None, "folder for run.json, loss.png, sample.txt and TensorBoard events")
    nproc_per_node: int = _opt(1, "processes to start on this machine")

    # the model
    num_layers: int = _opt(4, "transformer layers", "in 1..100000")
    hidden_size: int = _opt(256, "width of the residual stream", "in 1..1048576")
    ffn_hidden_size: int = _derived(
        _default_ffn_hidden_size, "width of the MLP; default 4 x hidden, or 8/3 x hidden if gated", "in 1..4194304"
    )
    num_attention_heads: int = _opt(4, "query heads", "in 1..65536")
    num_query_groups: int = _derived(
        lambda c: c.num_attention_heads, "key/value heads (GQA); default: as many as query heads", "in 1..65536"
    )
    kv_channels: int = _derived(
        lambda c: c.hidden_size // max(1, c.num_attention_heads),
        "size of a head; default hidden_size / num_attention_heads",
        "in 1..65536",
    )
    seq_length: int = _opt(256, "tokens per sequence", "in 1..2147483647")
    max_position_embeddings: int = _derived(
        lambda c: c.seq_length, "longest sequence the model supports; default seq_length", "in 1..2147483647"
    )
    position_embedding_type: str = _opt(
        "learned_absolute", "kind of position embedding", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: float = _opt(10000.0, "base of the rotary frequencies")
    rotary_percent: float = _opt(1.0, "fraction of a head's channels that is rotated", "in (0, 1]")
    rotary_seq_len_interpolation_factor: float = _opt(1.0, "divisor of the positions that the angles are made of")
    rotary_interleaved: bool = _opt(False, "rotate channels (2i, 2i+1) instead of (i, i + r/2)")
    use_rope_scaling: bool = _opt(False, "scale rotary frequencies as Llama 3.1 does")
    rope_scaling_factor: float = _opt(8.0, "by how much --use-rope-scaling slows the lowest frequencies")
    normalization: str = _opt("LayerNorm", "kind of norm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = _opt(1e-5, "epsilon added to the variance in norms")
    apply_layernorm_1p: bool = _opt(False, "norms store their factor minus 1 (centred at zero)")
    swiglu: bool = _opt(False, "gated MLP: silu(a) * b")
    geglu: bool = _opt(False, "gated MLP: gelu(a) * b")
    squared_relu: bool = _opt(False, "MLP with relu(a)^2")
    gelu_approximate: str = _derived(
        lambda c: "tanh" if c.mlp_bias else "none",
        "approximation of gelu; default tanh, as Megatron fuses gelu with a bias, or none without a bias",
        choices=("tanh", "none", "fast"),
    )
    disable_bias_linear: bool = _opt(False, "no biases in linear layers")
    add_qkv_bias: bool = _opt(False, "a bias in the QKV layer even with --disable-bias-linear")
    add_dense_bias: bool = _opt(False, "a bias in attention's output projection even with --disable-bias-linear")
    add_mlp_bias: bool = _opt(False, "biases in the MLP even with --disable-bias-linear")
    qk_layernorm: bool = _opt(False, "normalise queries and keys of every head before the rotary positions")
    untie_embeddings_and_output_weights: bool = _opt(False, "a separate output layer, not tied to the word embedding")
    use_sandwich_norm: bool = _opt(
        False, "also normalise the outputs of attention and MLP before the residual addition"
    )
    use_parallel_residual: bool = _opt(
        False, "attention and MLP read the same input, and both outputs are added to it (GPT-NeoX)"
    )
    attn_post_norm_scale: float = _opt(1.0, "initial gamma of the norm after attention (sandwich norm)", ">= 0")
    ffn_post_norm_scale: float = _opt(1.0, "initial gamma of the norm after the MLP (sandwich norm)", ">= 0")
    attention_dropout: float = _opt(0.1, "dropout on attention probabilities", "in [0, 1)")
    hidden_dropout: float = _opt(0.1, "dropout on embeddings and on the outputs of attention and MLP", "in [0, 1)")
    init_method_std: float = _opt(0.02, "standard deviation of initial weights")
    embedding_init_method_std: float = _derived(
        lambda c: c.init_method_std, "standard deviation of initial embeddings; default init_method_std"
    )
    use_flash_attn: bool = _opt(
        True, "compute attention with flash_attention instead of scale_mask_softmax", no="no-flash-attn"
    )
    pre_tokens: int | None = _opt(
        None,
        "how many preceding tokens a query sees; default all",
        "in -2147483648..2147483647",
        aliases=("pre-tockens",),
    )
    next_tokens: int | None = _opt(
        None,
        "how many following tokens a query sees; attention is causal, so values above 0 act as 0",
        "in -2147483648..2147483647",
        aliases=("next-tockens",),
    )
    window_attn_skip_freq: str | None = _opt(
        None, "layers without the window: every N-th, or a list of 1 (window) and 0 such as [1,0]*4"
    )
    no_rope_freq: str | None = _opt(
        None, "layers without rotary positions: every N-th, or a list of 1 (without) and 0 such as [0,0,0,1]*4"
    )
    softmax_scale: float | None = _opt(None, "factor of the attention scores; default 1 / sqrt(kv_channels)")
    attn_logit_softcapping: float | None = _opt(
        None, "CAP of the attention scores: CAP tanh(score / CAP), before masks (Gemma 2)"
    )
    shape_order: str = _opt(
        "SBND",
        "tensor layout passed to flash_attention; SBND, BSND and BNSD pass views",
        choices=("SBH", "BSH", "SBND", "BSND", "BNSD"),
    )
    multi_latent_attention: bool = _opt(
        False, "keys and values of all heads are products of one small latent vector per token (DeepSeek-V2)"
    )
    q_lora_rank: int | None = _opt(
        None, "size of the latent of the queries; default: queries without a latent", "in 1..1048576"
    )
    kv_lora_rank: int = _opt(32, "size of the latent of keys and values", "in 1..1048576")
    qk_head_dim: int = _opt(128, "channels of a latent query's or key's head without rotary positions", "in 1..65536")
    qk_pos_emb_head_dim: int = _opt(
        64, "channels with rotary positions beside them; all heads share those of the key", "in 1..65536"
    )
    v_head_dim: int = _opt(128, "channels of a latent value's head", "in 1..65536")
    experimental_attention_variant: str | None = _opt(
        None, "attention of some layers: a recurrence, the gated delta rule", choices=("gated_delta_net",)
    )
    linear_attention_freq: str | None = _opt(
        None, "layers with that recurrence: all but every N-th, or a list of 0 and 1 such as [1]*3+[0]"
    )
    linear_conv_kernel_dim: int = _opt(4, "tokens that its convolution reads", "in 1..65536")
    linear_key_head_dim: int = _opt(128, "channels of a head of its queries and keys", "in 1..65536")
    linear_value_head_dim: int = _opt(128, "channels of a head of its values", "in 1..65536")
    linear_num_key_heads: int = _opt(16, "heads of its queries and keys", "in 1..65536")
    linear_num_value_heads: int = _opt(32, "heads of its values; a multiple of those of the keys", "in 1..65536")
    attention_output_gate: bool = _opt(False, "multiply the heads of attention by sigmoids of projections of its input")
    rope_type: str = _derived(
        lambda c: "yarn" if c.multi_latent_attention else "rope",
        "rotary positions: plain, or scaled for longer sequences by YaRN (default of latent attention) or LongRoPE",
        choices=("rope", "yarn", "longrope"),
    )
    rotary_scaling_factor: float = _opt(1.0, "YaRN, LongRoPE: longest sequence, in original_max_position_embeddings")
    original_max_position_embeddings: int = _opt(4096, "YaRN, LongRoPE: longest sequence before the extension")
    short_factor: tuple[str, ...] = _opt(
        (), "LongRoPE: divisor of each rotary frequency in sequences of at most that length, e.g. 1.0,1.05"
    )
    long_factor: tuple[str, ...] = _opt((), "LongRoPE: divisor of each rotary frequency in longer sequences")
    beta_fast: float = _opt(32.0, "YaRN: channels that turn more often within it keep their frequency")
    beta_slow: float = _opt(1.0, "YaRN: channels that turn less often have it divided by rotary_scaling_factor")
    mscale: float = _opt(1.0, "YaRN: coefficient of the factor of the rotated channels", ">= 0")
    mscale_all_dim: float = _opt(0.0, "YaRN: coefficient of the factor of all channels", ">= 0")
    embedding_multiplier_scale: float = _opt(1.0, "factor of the word embeddings (Gemma: sqrt(hidden_size))")
    residual_multiplier: float = _opt(1.0, "factor of the outputs of attention and MLP in the residual sum (Granite)")
    output_multiplier_scale: float = _opt(1.0, "factor of the logits")
    output_logit_softcapping: float | None = _opt(None, "CAP of the logits: CAP tanh(logit / CAP) (Gemma 2)")
    make_vocab_size_divisible_by: int = _opt(128, "pad the vocabulary to a multiple of this", "in 1..2147483647")
    pad_vocab_size_to: int | None = _opt(
        None, "size of the padded vocabulary, instead of a multiple", "in 1..2147483647"
    )
    mask_padded_vocab: bool = _opt(
        False,
        "leave the ids that pad the vocabulary out of the loss; on with --sft and for models of Hugging Face",
    )

    # mixture of experts
    num_experts: int | None = _opt(
        None, "experts of a mixture-of-experts layer; default: dense layers only", "in 1..65536"
    )
    moe_layer_freq: str = _opt(
        "1", "layers with experts: every N-th from the first on, or a list of 0 and 1 such as [0]+[1]*3"
    )
    moe_router_topk: int = _opt(2, "experts per token")
    moe_router_load_balancing_type: tuple[str, ...] = _opt(
        ("aux_loss",), f"how the load is balanced: {', '.join(BALANCING)}; several losses add up", words=True
    )
    moe_aux_loss_coeff: tuple[str, ...] = _opt(("0.0",), "coefficient of each load-balancing loss", words=True)
    moe_z_loss_coeff: float | None = _opt(None, "coefficient of the router's z-loss", ">= 0")
    moe_router_score_function: str = _opt("softmax", "scores of the router", choices=("softmax", "sigmoid"))
    moe_router_pre_softmax: bool = _opt(False, "softmax over all experts instead of those chosen")
    moe_router_num_groups: int | None = _opt(None, "groups of experts, of which each token uses a few")
    moe_router_group_topk: int | None = _opt(None, "groups per token")
    moe_router_topk_scaling_factor: float | None = _opt(None, "factor of the probabilities")
    moe_router_enable_expert_bias: bool = _opt(
        False, "balance the load by a bias of each expert's score, without an auxiliary loss"
    )
    moe_router_bias_update_rate: float = _opt(1e-3, "change of that bias per step", ">= 0")
    moe_router_dtype: str | None = _opt(
        None, "dtype of the router's product; default: the model's", choices=("fp32", "fp64")
    )
    moe_ffn_hidden_size: int = _derived(
        lambda c: c.ffn_hidden_size or _default_ffn_hidden_size(c),
        "width of an expert; default ffn_hidden_size",
        "in 1..4194304",
    )
    moe_shared_expert_intermediate_size: int | None = _opt(
        None, "width of an expert that every token uses; default: there is none", "in 1..4194304"
    )
    moe_shared_expert_gate: bool = _opt(False, "multiply its output by the sigmoid of a projection of its input")
    moe_expert_capacity_factor: float | None = _opt(
        None, "tokens that an expert accepts, in multiples of an even share; default: all"
    )
    moe_pad_expert_input_to_capacity: bool = _opt(False, "give every expert as many rows as it accepts")
    moe_token_drop_policy: str = _opt(
        "probs", "which tokens an expert accepts: the most probable, or the first", choices=("probs", "position")
    )
    moe_token_dispatcher_type: str = _opt(
        "alltoall", "how tokens reach experts on other ranks", choices=("alltoall", "allgather")
    )
    moe_per_layer_logging: bool = _opt(False, "log the load of the experts of every layer")

    # data
    data_path: tuple[str, ...] = _opt(
        (), "prefixes of .bin/.idx pairs, or WEIGHT PREFIX pairs; default: the built-in corpus", words=True
    )
    train_data_path: tuple[str, ...] = _opt((), "the same for training only; --split does not apply", words=True)
    valid_data_path: tuple[str, ...] = _opt((), "the same for validation only", words=True)
    test_data_path: tuple[str, ...] = _opt((), "the same for testing only", words=True)
    text_file: str | None = _opt(None, "a UTF-8 file to train on")
    mock_data: bool = _opt(False, "train on megatron-core's artificial data: ascending numbers as documents")
    reset_position_ids: bool = _opt(False, "restart position ids after each end-of-document token")
    reset_attention_mask: bool = _opt(False, "mask attention across document boundaries")
    eod_mask_loss: bool = _opt(False, "mask the loss where the input is the end-of-document token")
    fim_data: bool = _opt(False, "rearrange texts for filling in the middle (arXiv 2207.14255)")
    fim_rate: float = _opt(0.5, "probability that a document's part of a sequence is rearranged", "in (0, 1]")
    fim_spm_rate: float = _opt(
        0.5, "probability that a rearranged text has its suffix first (suffix, prefix, middle)", "in (0, 1]"
    )
    fim_split_sample: str | None = _opt(None, "token that separates the fragments of a document, such as files")
    fim_fragment_rate: float | None = _opt(
        None, "probability that a fragment of such a document is rearranged", "in (0, 1]"
    )
    fim_no_prefix: str | None = _opt(None, "beginning of texts that are not rearranged")
    fim_prefix_token: str = _opt("<fim_prefix>", "token before the prefix")
    fim_middle_token: str = _opt("<fim_middle>", "token before the middle")
    fim_suffix_token: str = _opt("<fim_suffix>", "token before the suffix")
    fim_pad_token: str = _opt("<fim_pad>", "token that fills a sequence whose text has become shorter")
    fim_eod_token: str | None = _opt(None, "token between documents; default: the tokenizer's end-of-document token")
    sft: bool = _opt(
        False,
        "supervised finetuning: data are JSON lines with prompt and completion (or response), or messages; the loss "
        "counts answers only",
    )
    chat_template: str | None = _opt(None, "Jinja template of messages (--sft); default the tokenizer's own")
    packing: bool = _opt(False, "put several examples into a sequence, without attention between them (--sft)")
    truncation: bool = _opt(False, "cut examples that are longer than the sequence, instead of refusing them (--sft)")
    split: str = _opt("969,30,1", "proportions of training, validation and test data")
    data_cache_path: str | None = _opt(None, "folder for index maps of the data; default in HAL's cache")
    tokenizer_type: str = _opt("ByteTokenizer", "kind of tokenizer", choices=TOKENIZERS)
    vocab_file: str | None = _opt(None, "vocabulary (GPT2BPETokenizer: vocab.json; BertWordPiece*: vocab.txt)")
    merge_file: str | None = _opt(None, "merges of the tokenizer (GPT2BPETokenizer: merges.txt)")
    tokenizer_model: str | None = _opt(None, "SentencePiece model, tokenizer.json, or a folder of Hugging Face")
    vocab_extra_ids: int = _opt(
        0, "<extra_id_N> tokens to append (BertWordPiece*, SentencePieceTokenizer)", "in 0..100000"
    )
    vocab_size: int | None = _opt(None, "number of token ids, without end-of-document (NullTokenizer)")

    # training
    micro_batch_size: int = _opt(4, "sequences per forward pass", "in 1..1048576")
    global_batch_size: int = _derived(full_batch_size, "sequences per step; default micro_batch_size", "in 1..1048576")
    rampup_batch_size: tuple[str, ...] = _opt(
        (), "START INCREMENT SAMPLES: the batch grows from START to --global-batch-size over SAMPLES", words=True
    )
    step_batch_size_schedule: tuple[str, ...] = _opt(
        (), "TOKENS:SIZE ...: the sequences per step from that many tokens on, such as 0:768 250B:1536", words=True
    )
    train_iters: int = _opt(100, "steps; with --train-samples as many as these take", aliases=("steps",))
    train_samples: int | None = _opt(None, "sequences to train on, instead of --train-iters")
    num_train_epochs: float | None = _opt(
        None, "passes over the examples, instead of --train-iters (--sft); default 1 if that is not given either"
    )
    exit_duration_in_mins: float | None = _opt(None, "save and stop after this many minutes")
    exit_interval: int | None = _opt(None, "save and stop when the iteration is a multiple of this")
    seed: int = _opt(1234, "seed of weights, data order and dropout", "in 0..4294967295")  # numpy's bound
    bf16: bool = _opt(False, "bfloat16 model with float32 master weights")
    fp32_residual_connection: bool = _opt(False, "float32 sums between the layers of a 16-bit model")
    fp16: bool = _opt(False, "float16 model with float32 master weights and loss scaling")
    fp8_format: str | None = _opt(
        None,
        "multiply the linear layers of a --bf16 model in float8: activations and weights in e4m3, gradients in e5m2 "
        "(hybrid) or e4m3",
        choices=("hybrid", "e4m3"),
    )
    fp8_recipe: str = _opt(
        "delayed",
        "the scales of float8 operands: one per tensor, of its values in earlier iterations (delayed) or its present "
        "ones (tensorwise), or one per 128 elements (weights: 128 x 128)",
        choices=("delayed", "tensorwise", "blockwise"),
    )
    fp8_amax_history_len: int = _opt(1, "iterations whose largest magnitudes --fp8-recipe delayed keeps")
    fp8_amax_compute_algo: str = _opt(
        "most_recent", "which of them makes the scale: the newest, or the largest", choices=("most_recent", "max")
    )
    fp8_margin: int = _opt(0, "makes the scale 2^margin times larger than the largest magnitude needs", ">= 0")
    first_last_layers_bf16: bool = _opt(False, "multiply the first and last layers in --bf16 beside --fp8-format")
    num_layers_at_start_in_bf16: int = _opt(1, "how many first ones", ">= 0")
    num_layers_at_end_in_bf16: int = _opt(1, "how many last ones", ">= 0")
    lr: float = _derived(
        lambda c: 2e-5 if c.sft else 6e-4, "peak learning rate; default 6e-4, or 2e-5 with --sft", ">= 0"
    )
    min_lr: float = _opt(0.0, "learning rate after the decay", ">= 0")
    lr_decay_style: str = _opt(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int = _derived(lambda c: c.train_iters, "steps until min_lr is reached; default train_iters")
    lr_decay_samples: int | None = _opt(None, "the same in sequences, with --train-samples")
    lr_warmup_iters: int = _opt(0, "steps of warm-up", ">= 0")
    lr_warmup_samples: int = _opt(0, "sequences of warm-up, with --train-samples", ">= 0")
    lr_warmup_fraction: float | None = _opt(
        None, "warm-up as a fraction of --lr-decay-iters", "in [0, 1)", aliases=("warmup",)
    )
    lr_warmup_style: str = _opt(
        "linear",
        "shape of the warm-up; those of DeepSpeed rise from the third step on, linearly or as the step's logarithm",
        choices=("linear", "deepspeed_linear", "deepspeed_log"),
    )
    lr_warmup_init: float = _opt(0.0, "learning rate at the first step of the warm-up", ">= 0")
    lr_wsd_decay_style: str = _opt(
        "exponential", "shape of the final decay of WSD", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = _opt(None, "steps of the final decay of WSD")
    lr_wsd_decay_samples: int | None = _opt(None, "the same in sequences, with --train-samples")
    decoupled_lr: float | None = _opt(None, "peak learning rate of word embeddings and output layer", ">= 0")
    decoupled_min_lr: float | None = _opt(None, "their learning rate after the decay; default --min-lr", ">= 0")
    use_checkpoint_opt_param_scheduler: bool = _opt(
        False, "continue with the learning-rate and weight-decay schedules stored in the checkpoint of --load"
    )
    weight_decay: float = _opt(0.01, "decoupled weight decay (not for biases and 1-D parameters)", ">= 0")
    apply_wd_to_qk_layernorm: bool = _opt(False, "decay the norms of queries and keys, too")
    weight_decay_incr_style: str = _opt(
        "constant",
        "change of the weight decay over the run, from --start-weight-decay to --end-weight-decay",
        choices=("constant", "linear", "cosine"),
    )
    start_weight_decay: float | None = _opt(None, "weight decay at the start", ">= 0")
    end_weight_decay: float | None = _opt(None, "weight decay at the end", ">= 0")
    adam_beta1: float = _opt(0.9, "decay of the first moment", "in [0, 1)")
    adam_beta2: float = _opt(0.999, "decay of the second moment", "in [0, 1)")
    adam_eps: float = _opt(1e-8, "epsilon added to the square root of the second moment")
    adam_bias_correction: bool = _opt(
        True, "divide the moments by 1 - beta^step, as Adam does", no="no-adam-bias-correction"
    )
    adam_eps_before_correction: bool = _opt(
        False, "add epsilon to the root of the second moment before its bias correction, as TensorFlow's Adam does"
    )
    clip_grad: float = _opt(1.0, "maximum gradient norm; 0 disables clipping", ">= 0")
    loss_scale: float | None = _opt(None, "constant loss scale (fp16); default dynamic")
    initial_loss_scale: float = _opt(2.0**32, "initial dynamic loss scale (fp16)")
    min_loss_scale: float = _opt(1.0, "minimum dynamic loss scale (fp16)")
    loss_scale_window: int = _opt(1000, "steps without overflow before the scale doubles (fp16)")
    hysteresis: int = _opt(2, "overflows before the scale halves (fp16)")
    cross_entropy_loss_fusion: bool = _opt(False, "fuse the loss as --cross-entropy-fusion-impl says")
    cross_entropy_fusion_impl: str = _opt(
        "native",
        "what is fused: the steps of the cross entropy (native and te; HAL always does), or also the output layer, so "
        "that backends that can need not store the logits (linear)",
        choices=("native", "te", "linear"),
    )
    cuda_graphs: bool = _opt(
        False, "record the forward and backward passes of a step as one graph, and repeat it without the host"
    )
    rerun_mode: str = _opt(
        "disabled",
        "compute a step again if its loss or gradients are not finite or far too large, to find the cause",
        choices=("disabled", "validate_results"),
    )
    skip_bad_batches: int = _opt(0, "batches that may be skipped if they cause such a step (--rerun-mode)", ">= 0")
    verify_ops: float = _opt(
        0.0,
        "share of the calls of ops that are compared with the float64 reference as the run goes on, e.g. 1e-4; a wrong "
        "result ends the run, or with --rerun-mode has its step computed again",
        "in [0, 1]",
    )
    recompute_granularity: str | None = _opt(
        None,
        "activation checkpointing of the attention core (selective) or of whole layers (full)",
        choices=("selective", "full"),
    )
    recompute_method: str | None = _opt(
        None,
        "full recomputation: of uniform chunks, or of the first layers of each stage",
        choices=("uniform", "block"),
    )
    recompute_num_layers: int | None = _opt(None, "layers per chunk (uniform), or layers recomputed per stage (block)")
    recompute_layer_list: tuple[str, ...] = _opt(
        (), "layers recomputed on each pipeline stage or virtual stage, from its first on, e.g. 3,1"
    )
    select_recompute_layer_list: tuple[str, ...] = _opt(
        (), "the same of layers that recompute only their attention, after those that are recomputed as a whole"
    )
    checkpoint_in_cpu: bool = _opt(False, "keep the inputs of recomputed layers in the host's memory")
    partition_activations: bool = _opt(
        False, "keep the inputs of recomputed layers divided over the tensor-parallel ranks"
    )

    # parallel dimensions
    tensor_model_parallel_size: int = _opt(
        1, "tensor-parallel ranks, which share each layer", aliases=("model-parallel-size",)
    )
    sequence_parallel: bool = _opt(False, "also shard norms and dropout along the sequence (with tensor parallelism)")
    tp_comm_overlap: bool = _opt(
        False, "overlap the gathers and reduce-scatters of --sequence-parallel with the products beside them"
    )
    pipeline_model_parallel_size: int = _opt(1, "pipeline-parallel ranks")
    num_layers_per_virtual_pipeline_stage: int | None = _opt(None, "layers per virtual stage (interleaved schedule)")
    pipeline_schedule: str = _opt(
        "1f1b",
        "pipeline schedule: one forward one backward, or zero bubble (V shape)",
        choices=("1f1b", "zbv"),
    )
    num_layer_list: tuple[str, ...] = _opt(
        (), "layers of each pipeline stage, or of each virtual stage in order, e.g. 3,5; default: equal shares"
    )
    noop_layers: tuple[str, ...] = _opt(
        (), "indices of layers that are left out but count in the pipeline's split, e.g. 0,7"
    )
    context_parallel_size: int = _opt(1, "context-parallel ranks, which share each sequence")
    context_parallel_algo: str = _opt(
        "ring",
        "attention across context-parallel ranks: keys and values go round, heads are exchanged, or both",
        choices=("ring", "ulysses", "hybrid"),
    )
    ulysses_degree_in_cp: int | None = _opt(
        None, "neighbouring context-parallel ranks that exchange heads (hybrid); a ring connects these groups"
    )
    expert_model_parallel_size: int = _opt(1, "expert-parallel ranks, which share the experts of each layer")
    expert_tensor_parallel_size: int = _derived(
        lambda c: c.tensor_model_parallel_size, "ranks that share each expert; default tensor_model_parallel_size"
    )
    use_distributed_optimizer: bool = _opt(False, "shard the optimizer state over data-parallel ranks (ZeRO stage 1)")
    zero_stage: int = _opt(0, "ZeRO: 0 off, 1 shard optimizer state, 2 also gradients, 3 also parameters", "in 0..3")
    overlap_grad_reduce: bool = _opt(False, "overlap the gradient reduction with the backward pass")
    ddp_bucket_size: int = _opt(10_000_000, "elements per bucket of the gradient reduction")
    distributed_timeout_minutes: float = _opt(10.0, "timeout of collectives; the error names the missing ranks")

    # checkpoints, evaluation, logging
    save: str | None = _opt(None, "folder for checkpoints")
    save_interval: int | None = _opt(None, "steps between checkpoints")
    async_save: bool = _opt(False, "write checkpoints in the background, from a copy in host memory")
    keep_checkpoint_max: int | None = _opt(None, "number of checkpoints to keep in --save; older ones are removed")
    load: str | None = _opt(None, "folder of checkpoints to resume from; a release checkpoint starts at iteration 0")
    exit_on_missing_checkpoint: bool = _opt(
        False, "stop if --load has no checkpoint, even if it is the folder of --save"
    )
    no_load_optim: bool = _opt(False, "do not load the state of the optimizer and of the learning-rate schedule")
    no_load_rng: bool = _opt(False, "continue with the --seed of this run, even if it is the default")
    accept_changed_data: bool = _opt(False, "resume from --load although the data or the tokenizer have changed")
    new_dataset: bool = _opt(False, "resume from --load with other data, from their first sample on")
    finetune: bool = _opt(False, "load only the weights from --load, and start at iteration 0")
    eval_interval: int | None = _opt(None, "steps between evaluations on the validation split")
    eval_iters: int = _opt(10, "batches per evaluation; 0 turns evaluation off", ">= 0")
    eval_global_batch_size: int | None = _opt(
        None, "sequences per batch of an evaluation; default global_batch_size", "in 1..1048576"
    )
    log_interval: int = _opt(10, "steps between log lines")
    log_format: str = _opt(
        "auto", "log lines: compact on a terminal, Megatron's elsewhere", choices=("auto", "compact", "megatron")
    )
    log_throughput: bool = _opt(False, "add the model's TFLOP/s per device to log lines and to the trackers")
    timing_log_level: int = _opt(
        0, "log the times of a step's phases: 1 the main ones, 2 also their parts and the communication", "in 0..2"
    )
    timing_log_option: str = _opt("minmax", "of these times over the ranks, show", choices=("max", "minmax", "all"))
    log_timers_to_tensorboard: bool = _opt(False, "send the longest of these times over the ranks to the trackers")
    log_straggler: bool = _opt(False, "log the ranks that compute slowest and fastest, without waiting for others")
    straggler_minmax_count: int = _opt(1, "how many of these ranks are listed")
    log_memory_to_tensorboard: bool = _opt(False, "send the device's memory statistics to the trackers")
    log_memory_interval: int | None = _opt(None, "steps between log lines on memory; default none")
    profile: bool = _opt(False, "profile some steps: a table of ops and traces in the folder profile of --run-dir")
    profile_step_start: int = _opt(10, "the step after which profiling starts", ">= 0")
    profile_step_end: int = _opt(12, "the last step that is profiled")
    profile_ranks: tuple[str, ...] = _opt(("0",), "ranks that are profiled, e.g. 0 1", words=True)
    use_pytorch_profiler: bool = _opt(
        False, "also run torch's profiler, whose trace shows the device's own work, and do not wait between ops"
    )
    record_memory_history: bool = _opt(False, "record the tensors of the profiled steps, by kind and as a snapshot")
    memory_snapshot_path: str = _opt("snapshot.pickle", "file of the snapshot; the rank is added to its name")
    tensorboard_dir: str | None = _opt(None, "folder for TensorBoard events; default --run-dir")
    wandb_project: str | None = _opt(None, "Weights & Biases project to log to")
    wandb_exp_name: str | None = _opt(None, "run name in Weights & Biases; default the name of --run-dir")
    sample_tokens: int = _opt(400, "tokens of sample text to generate after training", ">= 0")
    sample_temperature: float = _opt(0.8, "sampling temperature of that text; 0 is greedy decoding", ">= 0")

    # not options
    padded_vocab_size: int = field(default=0, init=False)
    vocabulary: int = field(default=0, init=False)
    """The rows of the embedding without padding."""
    epoch_sequences: int = field(default=0, init=False)
    """The sequences of one pass over the examples with --sft; 0 until the data are open."""
    given: frozenset[str] = field(default=frozenset(), init=False, repr=False)
    """Names of the options that the user set, in any source."""

    def __post_init__(self) -> None:
        # Attributes rather than fields: they do not describe the run, and checkpoints do not store them.
        self.origins: Mapping[str, str] = {}
        self.notes: tuple[str, ...] = ()
        self.noted: Mapping[str, str] = {}
        # Values may still be out of bounds here (zero heads, a negative size): validation.py reports them later.
        if self.num_experts == 1:  # Megatron-DeepSpeed's default: one expert that gets every token is a dense layer
            self.num_experts = None
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, (getattr(self, name),))
        if self.train_samples is not None:
            self.train_iters = iterations(self, self.train_samples)
        for option in fields(self):
            rule = option.metadata.get("rule")
            if rule is not None and getattr(self, option.name) is None:
                setattr(self, option.name, rule(self))
        if self.lr_warmup_fraction is not None and not self.lr_warmup_iters:
            self.lr_warmup_iters = int(self.lr_warmup_fraction * self.lr_decay_iters)
        self.set_vocabulary(self.vocab_size or 1)

    def set_vocabulary(self, size: int) -> None:
        """Pads a vocabulary of `size` ids. Unlike in Megatron, the result does not depend on the parallel layout."""
        self.vocabulary = size
        if self.pad_vocab_size_to is not None:
            if size > self.pad_vocab_size_to:
                raise ConfigError(
                    f"--pad-vocab-size-to {self.pad_vocab_size_to} is less than the vocabulary size {size}"
                )
            self.padded_vocab_size = self.pad_vocab_size_to
            return
        step = self.make_vocab_size_divisible_by
        self.padded_vocab_size = -(-size // step) * step if step > 0 else size

    def set_epoch(self, sequences: int) -> None:
        """Sets the number of steps of a run that is given in passes over its data, of `sequences` each."""
        counts, self.epoch_sequences = self.counts_epochs, sequences
        if counts:
            size, self.num_train_epochs = self.global_batch_size, self.num_train_epochs or 1.0
            steps = math.ceil(self.num_train_epochs * sequences / size)  # the last batch is filled up
            self.train_iters = iterations(self, steps * size)
            if "lr_decay_iters" not in self.given:
                self.lr_decay_iters = self.train_iters
            if self.lr_warmup_fraction is not None and "lr_warmup_iters" not in self.given:
                self.lr_warmup_iters = int(self.lr_warmup_fraction * self.lr_decay_iters)

    @property
    def counts_epochs(self) -> bool:
        """Whether the number of steps follows from that of the examples."""
        steps_given = "train_iters" in self.given or "train_iters" in self.origins  # by the user, or by a checkpoint
        return self.sft and self.train_samples is None and not (steps_given and self.num_train_epochs is None)

    @property
    def rotates(self) -> bool:
        """Whether attention rotates queries and keys by their positions, which latent attention always does."""
        return self.position_embedding_type == "rope" or self.multi_latent_attention

    @property
    def restarts_positions(self) -> bool:
        """Whether every document has positions of its own."""
        return self.reset_position_ids or self.sft

    @property
    def separates_documents(self) -> bool:
        """Whether attention stays within documents."""
        return self.reset_attention_mask or self.sft

    @property
    def has_documents(self) -> bool:
        """Whether the model needs to know where documents begin."""
        return self.restarts_positions or self.separates_documents

    @property
    def ignores_labels(self) -> bool:
        """Whether there are labels that the loss does not count."""
        return self.eod_mask_loss or self.sft

    @property
    def predicts_padding(self) -> bool:
        """Whether the ids that pad the vocabulary take part in the loss's softmax, as in Megatron. A model that has
        learnt elsewhere has no such ids."""
        return not (self.sft or self.mask_padded_vocab)

    @property
    def expert_count(self) -> int:
        """The experts of a mixture-of-experts layer; 0 if all layers are dense."""
        return self.num_experts or 0

    def in_float8(self, layer: int) -> bool:
        """Whether the linear layers of layer number `layer` multiply in float8."""
        kept = self.first_last_layers_bf16
        first, last = (self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16) if kept else (0, 0)
        return self.fp8_format is not None and first <= layer < self.num_layers - last

    def has_experts(self, layer: int) -> bool:
        """Whether layer number `layer` is a mixture of experts."""
        return self.num_experts is not None and layer_pattern(self.moe_layer_freq, self.num_layers)[layer]

    @property
    def qkv_bias(self) -> bool:
        """Whether the QKV layer has a bias."""
        return self.add_qkv_bias or not self.disable_bias_linear

    @property
    def projection_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.add_dense_bias or not self.disable_bias_linear

    @property
    def mlp_bias(self) -> bool:
        """Whether both layers of the MLP have biases."""
        return self.add_mlp_bias or not self.disable_bias_linear

    @property
    def eval_batch_size(self) -> int:
        """Sequences per batch of an evaluation."""
        return self.eval_global_batch_size or self.global_batch_size

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Channels of a head of the queries and keys, and of the values."""
        if self.multi_latent_attention:
            return self.qk_head_dim + self.qk_pos_emb_head_dim, self.v_head_dim
        return self.kv_channels, self.kv_channels

    def cached_heads(self, layer: int, tp: int = 1) -> list[tuple[int, int]]:
        """(heads, channels of a head) of each tensor that a layer of a generating model stores per token on one of `tp`
        tensor-parallel ranks: keys and values, of latent attention one vector that all heads and ranks share, or what
        the recurrence of linear attention reads."""
        if self.has_linear_attention(layer):
            groups, per_group = self.linear_num_key_heads, self.linear_num_value_heads // self.linear_num_key_heads
            mixed = 2 * self.linear_key_head_dim + per_group * self.linear_value_head_dim
            return [(groups // tp, mixed), (groups // tp, 2 * per_group)]
        if self.multi_latent_attention:
            return [(1, self.kv_lora_rank + self.qk_pos_emb_head_dim)]
        return [(self.num_query_groups // tp, self.kv_channels)] * 2

    @property
    def ulysses_degree(self) -> int:
        """How many context-parallel ranks exchange heads for parts of the sequence."""
        degrees = {"ring": 1, "ulysses": self.context_parallel_size}
        return degrees.get(self.context_parallel_algo, min(self.ulysses_degree_in_cp or 1, self.context_parallel_size))

    @property
    def ring_degree(self) -> int:
        """How many ranks, or groups of ranks that exchange heads, pass keys and values round; 1: there is no ring."""
        return self.context_parallel_size // self.ulysses_degree

    @property
    def key_copies(self) -> int:
        """How many ranks that exchange heads read the same head of keys and values, each a copy of it."""
        groups = self.num_query_groups // self.tensor_model_parallel_size
        return self.ulysses_degree // math.gcd(self.ulysses_degree, groups)

    @property
    def fuses_output_layer(self) -> bool:
        """Whether training computes the loss from the output layer's input (ops.linear_cross_entropy)."""
        return self.cross_entropy_loss_fusion and self.cross_entropy_fusion_impl == "linear"

    @property
    def params_dtype(self) -> torch.dtype:
        """dtype of the model's parameters and activations."""
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

    @property
    def residual_dtype(self) -> torch.dtype:
        """dtype of the sums between the layers."""
        return torch.float32 if self.fp32_residual_connection else self.params_dtype

    @property
    def window(self) -> tuple[int | None, int]:
        """(pre_tokens, next_tokens) of attention: the given window, never beyond causality."""
        return self.pre_tokens, 0 if self.next_tokens is None else min(0, self.next_tokens)

    def window_of(self, layer: int) -> tuple[int | None, int]:
        """The window of attention in layer number `layer`, of which --window-attn-skip-freq takes it."""
        frequency = self.window_attn_skip_freq
        if frequency is None:
            return self.window
        # A number says which layers have no window, and a list which have one.
        windowed = layer_pattern(frequency, self.num_layers, last=True)[layer] != frequency.strip().isdigit()
        return self.window if windowed else (None, 0)

    @property
    def longest_short_rotation(self) -> int | None:
        """The longest sequence with LongRoPE's angles for short ones; None if angles do not depend on the length."""
        return self.original_max_position_embeddings if self.rope_type == "longrope" else None

    def has_linear_attention(self, layer: int) -> bool:
        """Whether layer number `layer` has linear attention instead of softmax attention."""
        return linear_attention.is_linear(self, layer)

    def has_rotation(self, layer: int) -> bool:
        """Whether layer number `layer` has rotary positions, if the model has them."""
        return self.no_rope_freq is None or not layer_pattern(self.no_rope_freq, self.num_layers, last=True)[layer]


WARMUP = {"lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_samples"}
"""The ways to give the warm-up; one replaces the others."""


class GivenOptions(dict[str, Any]):
    """Values of the options that the user gave, by field name.

    origins: where each was given; notes: messages about given values that have no effect; noted: options of other
    trainers without effect, with the reason; problems: what is wrong with other options than these. adopted: names that
    a checkpoint gave and not the user.
    """

    def __init__(self) -> None:
        super().__init__()
        self.origins: dict[str, str] = {}
        self.notes: list[str] = []
        self.noted: dict[str, str] = {}
        self.problems: list[ConfigError] = []
        self.adopted: set[str] = set()

    def take(self, values: Mapping[str, Any], origins: Mapping[str, str]) -> None:
        """Adds values; they override earlier ones, a way to give the warm-up also another way."""
        if not WARMUP.isdisjoint(values):
            for name in WARMUP - set(values):
                self.pop(name, None)
                self.origins.pop(name, None)
        self.update(values)
        self.origins.update(origins)


def resolve(options: Mapping[str, Any]) -> Config:
    """The Config of these options (by field name). All of them count as given by the user. Does not validate."""
    config = Config(**options)
    config.given = frozenset(options) - (options.adopted if isinstance(options, GivenOptions) else set())
    if isinstance(options, GivenOptions):
        config.origins, config.notes, config.noted = dict(options.origins), tuple(options.notes), dict(options.noted)
    return config
