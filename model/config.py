"""The one schema of a training run: every option, its Megatron name, its default and what it means.

The command line, a YAML file and the environment all fill this dataclass (see arguments.py); contradictions are found
in checks.py. A `Config` that has been built is complete: derived values (head size, ffn size, ...) are filled in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from hal import HalError


class ConfigError(HalError):
    """The options of a run are wrong: unknown, of the wrong type, ignored, or contradicting each other."""


READY = Path(__file__).with_name("configs")
"""The ready configurations: files NAME.yaml of options by name."""


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
    "in (0, 1]": lambda x: 0 < x <= 1,
    "in 0..4294967295": lambda x: 0 <= x < 2**32,
    "in 0..3": lambda x: 0 <= x <= 3,
    "any integer": lambda x: True,
}
"""What a number may be required to be: the text of the error message, and the test."""


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
"""Values of --tokenizer-type; see tokenizer.KINDS."""


def _opt(
    default: Any,
    help: str,
    bounds: str = "> 0",
    *,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    no: str = "",
    words: bool = False,
) -> Any:
    """A field. bounds: what a number must be; aliases: other spellings of the flag; no: the flag for False; words: the
    flag takes several words."""
    meta = {"help": help, "bounds": bounds, "choices": choices, "aliases": aliases, "no": no, "words": words}
    return field(default=default, metadata=meta)


@dataclass
class Config:
    """All options of `hal train`. Field names are the flags with underscores."""

    # where it runs
    backend: str | None = _opt(None, "backend that runs the operations (cpu_ref, cuda, npu, or a plug-in's name)")
    simulate: bool = _opt(False, "run the backend on its simulator instead of its device")
    fallback: str = _opt("error", "what happens to a call no implementation accepts", choices=("error", "reference"))
    pin: tuple[str, ...] = _opt((), "OP=IMPLEMENTATION, the only one allowed for that op; may be repeated")
    run_dir: str | None = _opt(None, "folder for run.json, loss.png, sample.txt and TensorBoard events")
    nproc_per_node: int = _opt(1, "processes to start on this machine")

    # the model
    num_layers: int = _opt(4, "transformer layers")
    hidden_size: int = _opt(256, "width of the residual stream")
    ffn_hidden_size: int | None = _opt(None, "width of the MLP; default 4 x hidden, or 8/3 x hidden if gated")
    num_attention_heads: int = _opt(4, "query heads")
    num_query_groups: int | None = _opt(None, "key/value heads (GQA); default: as many as query heads")
    kv_channels: int | None = _opt(None, "size of a head; default hidden_size / num_attention_heads")
    seq_length: int = _opt(256, "tokens per sequence")
    max_position_embeddings: int | None = _opt(None, "longest sequence the model can take; default seq_length")
    position_embedding_type: str = _opt(
        "learned_absolute", "how positions enter", choices=("learned_absolute", "rope", "none")
    )
    rotary_base: float = _opt(10000.0, "base of the rotary frequencies")
    rotary_percent: float = _opt(1.0, "share of a head's channels that is rotated", "in (0, 1]")
    rotary_interleaved: bool = _opt(False, "rotate channels (2i, 2i+1) instead of (i, i + r/2)")
    normalization: str = _opt("LayerNorm", "kind of norm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = _opt(1e-5, "added to the variance inside the norms")
    swiglu: bool = _opt(False, "gated MLP: silu(a) * b")
    geglu: bool = _opt(False, "gated MLP: gelu(a) * b")
    gelu_approximate: str = _opt("tanh", "form of gelu", choices=("tanh", "none", "fast"))
    disable_bias_linear: bool = _opt(False, "no biases in linear layers")
    add_qkv_bias: bool = _opt(False, "a bias in the QKV layer although the others have none")
    untie_embeddings_and_output_weights: bool = _opt(False, "an output layer of its own")
    use_sandwich_norm: bool = _opt(False, "also normalise what attention and MLP add to the residual stream")
    attn_post_norm_scale: float = _opt(1.0, "initial gamma of the norm after attention (sandwich norm)", ">= 0")
    ffn_post_norm_scale: float = _opt(1.0, "initial gamma of the norm after the MLP (sandwich norm)", ">= 0")
    attention_dropout: float = _opt(0.1, "dropout on attention probabilities", "in [0, 1)")
    hidden_dropout: float = _opt(0.1, "dropout on embeddings and on what each block adds", "in [0, 1)")
    init_method_std: float = _opt(0.02, "standard deviation of initial weights")
    embedding_init_method_std: float | None = _opt(None, "that of the embeddings; default: of all weights")
    use_flash_attn: bool = _opt(True, "attention through flash_attention, not scale_mask_softmax", no="no-flash-attn")
    pre_tokens: int | None = _opt(
        None, "how many tokens back a query sees; default all", "any integer", aliases=("pre-tockens",)
    )
    next_tokens: int | None = _opt(
        None,
        "how many tokens ahead a query may see; a GPT is causal, so more than 0 means 0",
        "any integer",
        aliases=("next-tockens",),
    )
    shape_order: str = _opt("SBH", "layout given to flash_attention", choices=("SBH", "BSH", "SBND", "BSND", "BNSD"))
    make_vocab_size_divisible_by: int = _opt(128, "the vocabulary is padded to a multiple of this")
    pad_vocab_size_to: int | None = _opt(None, "size of the padded vocabulary, in place of a multiple")

    # data
    data_path: tuple[str, ...] = _opt(
        (), "prefix of a .bin/.idx pair, or several, or WEIGHT PREFIX pairs; default: the built-in corpus", words=True
    )
    train_data_path: tuple[str, ...] = _opt((), "the same for training only; --split does not apply", words=True)
    valid_data_path: tuple[str, ...] = _opt((), "the same for validation only", words=True)
    test_data_path: tuple[str, ...] = _opt((), "the same for testing only", words=True)
    text_file: str | None = _opt(None, "a UTF-8 file to train on")
    reset_position_ids: bool = _opt(False, "count positions anew after every end of a document")
    reset_attention_mask: bool = _opt(False, "let no token see tokens of an earlier document")
    eod_mask_loss: bool = _opt(False, "do not train on what follows the end of a document")
    split: str = _opt("969,30,1", "shares of the documents for training, validation and test")
    data_cache_path: str | None = _opt(None, "folder for the data's index maps; default in HAL's cache")
    tokenizer_type: str = _opt("ByteTokenizer", "kind of tokenizer", choices=TOKENIZERS)
    vocab_file: str | None = _opt(None, "vocabulary (GPT2BPETokenizer: vocab.json; BertWordPiece*: vocab.txt)")
    merge_file: str | None = _opt(None, "merges of the tokenizer (GPT2BPETokenizer: merges.txt)")
    tokenizer_model: str | None = _opt(None, "SentencePiece model, or tokenizer.json (HuggingFaceTokenizer)")
    vocab_extra_ids: int = _opt(0, "<extra_id_N> tokens to append (BertWordPiece*, SentencePieceTokenizer)", ">= 0")
    vocab_size: int | None = _opt(None, "number of token ids without end-of-document (NullTokenizer)")

    # training
    micro_batch_size: int = _opt(4, "sequences per forward pass")
    global_batch_size: int | None = _opt(None, "sequences per step; default micro_batch_size")
    train_iters: int = _opt(100, "steps")
    exit_interval: int | None = _opt(None, "stop (and save) when the iteration is a multiple of this")
    seed: int = _opt(1234, "seed of weights, data order and dropout", "in 0..4294967295")  # numpy's bound
    bf16: bool = _opt(False, "bfloat16 model with float32 master weights")
    fp16: bool = _opt(False, "float16 model with float32 master weights and loss scaling")
    lr: float = _opt(6e-4, "peak learning rate", ">= 0")
    min_lr: float = _opt(0.0, "learning rate after the decay", ">= 0")
    lr_decay_style: str = _opt(
        "linear", "shape of the decay", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    lr_decay_iters: int | None = _opt(None, "steps until min_lr; default train_iters")
    lr_warmup_iters: int = _opt(0, "steps of linear warm-up", ">= 0")
    lr_warmup_fraction: float | None = _opt(
        None, "the warm-up as a share of --lr-decay-iters", "in [0, 1)", aliases=("warmup",)
    )
    lr_warmup_init: float = _opt(0.0, "learning rate at the first step of the warm-up", ">= 0")
    lr_wsd_decay_style: str = _opt(
        "exponential", "shape of WSD's final decay", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = _opt(None, "steps of WSD's final decay")
    weight_decay: float = _opt(0.01, "decoupled weight decay (not for biases and 1-D parameters)", ">= 0")
    adam_beta1: float = _opt(0.9, "decay of the first moment", "in [0, 1)")
    adam_beta2: float = _opt(0.999, "decay of the second moment", "in [0, 1)")
    adam_eps: float = _opt(1e-8, "added to the root of the second moment")
    clip_grad: float = _opt(1.0, "largest gradient norm; 0 turns clipping off", ">= 0")
    loss_scale: float | None = _opt(None, "constant loss scale (fp16); default dynamic")
    initial_loss_scale: float = _opt(2.0**32, "first dynamic loss scale (fp16)")
    min_loss_scale: float = _opt(1.0, "smallest dynamic loss scale (fp16)")
    loss_scale_window: int = _opt(1000, "steps without overflow before the scale doubles (fp16)")
    hysteresis: int = _opt(2, "overflows before the scale halves (fp16)")
    recompute_granularity: str | None = _opt(
        None, "what is recomputed in the backward pass", choices=("selective", "full")
    )
    recompute_method: str | None = _opt(
        None, "full recomputation: chunks of layers, or the first layers", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = _opt(None, "layers per chunk (uniform) or in all (block)")

    # parallel dimensions
    tensor_model_parallel_size: int = _opt(1, "ranks that share each layer", aliases=("model-parallel-size",))
    sequence_parallel: bool = _opt(False, "split norms and dropout along the sequence too")
    pipeline_model_parallel_size: int = _opt(1, "stages")
    num_layers_per_virtual_pipeline_stage: int | None = _opt(None, "layers per virtual stage (interleaving)")
    pipeline_schedule: str = _opt(
        "1f1b",
        "order of the pipeline's work: one forward one backward, or zero bubble (V shape)",
        choices=("1f1b", "zbv"),
    )
    num_layer_list: tuple[str, ...] = _opt((), "layers of each pipeline stage, e.g. 3,5; default: even")
    noop_layers: tuple[str, ...] = _opt((), "numbers of layers that only fill a place in the pipeline, e.g. 0,7")
    context_parallel_size: int = _opt(1, "ranks that share each sequence")
    context_parallel_algo: str = _opt("ring", "how attention crosses ranks", choices=("ring", "ulysses"))
    expert_model_parallel_size: int = _opt(1, "ranks that share the experts")
    use_distributed_optimizer: bool = _opt(False, "shard the optimizer's state over data-parallel ranks")
    zero_stage: int = _opt(0, "0 none, 1 optimizer, 2 + gradients, 3 + parameters", "in 0..3")
    overlap_grad_reduce: bool = _opt(False, "reduce gradients while the backward pass runs")
    ddp_bucket_size: int = _opt(10_000_000, "elements per message of the gradient reduction")
    distributed_timeout_minutes: float = _opt(10.0, "time after which a collective gives up and names who is missing")

    # checkpoints, evaluation, logging
    save: str | None = _opt(None, "folder for checkpoints")
    save_interval: int | None = _opt(None, "steps between checkpoints")
    async_save: bool = _opt(False, "write checkpoints in the background, from a copy in host memory")
    keep_checkpoint_max: int | None = _opt(None, "how many checkpoints --save keeps; older ones are removed")
    load: str | None = _opt(None, "folder of checkpoints to continue from; a release in it starts at iteration 0")
    no_load_optim: bool = _opt(False, "start the optimizer and its schedule anew, with the loaded weights")
    no_load_rng: bool = _opt(False, "draw with this run's --seed, whatever the checkpoint was made with")
    finetune: bool = _opt(False, "take only the weights of --load, and begin at iteration 0")
    eval_interval: int | None = _opt(None, "steps between evaluations on the validation split")
    eval_iters: int = _opt(10, "batches per evaluation")
    log_interval: int = _opt(10, "steps between log lines")
    wandb_project: str | None = _opt(None, "project of Weights & Biases to send the run's numbers to")
    wandb_exp_name: str | None = _opt(None, "name of the run there; default that of its folder")
    sample_tokens: int = _opt(400, "length of the text generated at the end, in tokens", ">= 0")
    sample_temperature: float = _opt(0.8, "temperature of that text; 0 takes the likeliest token", ">= 0")

    # derived
    padded_vocab_size: int = field(default=0, init=False)
    given: frozenset[str] = field(default=frozenset(), init=False, repr=False)
    """Names of the options that were set by the user, wherever."""

    # No fields: they say nothing about the run.
    origins = MappingProxyType({})
    """Where each of those options was set, by name."""
    notes = ()
    """What was given and has no effect, in lines to show."""

    def __post_init__(self) -> None:
        self.derive()

    def derive(self) -> None:
        """Fills the defaults that depend on other options. Safe on nonsense values: checks.py reports those later."""
        for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
            if isinstance(getattr(self, name), str):
                setattr(self, name, (getattr(self, name),))
        gated = self.swiglu or self.geglu
        if self.kv_channels is None:
            self.kv_channels = self.hidden_size // max(1, self.num_attention_heads)
        if self.num_query_groups is None:
            self.num_query_groups = self.num_attention_heads
        if self.ffn_hidden_size is None:
            # Megatron's rule keeps the parameter count of a gated MLP near that of a plain one.
            self.ffn_hidden_size = max(64, self.hidden_size * 8 // 3 // 64 * 64) if gated else 4 * self.hidden_size
        if self.max_position_embeddings is None:
            self.max_position_embeddings = self.seq_length
        if self.global_batch_size is None:
            self.global_batch_size = self.micro_batch_size
        if self.lr_decay_iters is None:
            self.lr_decay_iters = self.train_iters
        if self.lr_warmup_fraction is not None and not self.lr_warmup_iters:
            self.lr_warmup_iters = int(self.lr_warmup_fraction * self.lr_decay_iters)
        if self.embedding_init_method_std is None:
            self.embedding_init_method_std = self.init_method_std
        self.set_vocabulary(self.vocab_size or 1)

    def set_vocabulary(self, size: int) -> None:
        """Pads a vocabulary of `size` ids. The result does not depend on the parallel layout, unlike Megatron's."""
        if self.pad_vocab_size_to is not None:
            if size > self.pad_vocab_size_to:
                raise ConfigError(f"--pad-vocab-size-to {self.pad_vocab_size_to} is less than the {size} ids there are")
            self.padded_vocab_size = self.pad_vocab_size_to
            return
        step = self.make_vocab_size_divisible_by
        self.padded_vocab_size = -(-size // step) * step if step > 0 else size

    @property
    def params_dtype(self) -> torch.dtype:
        """dtype of the model's parameters and activations."""
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else torch.float32

    @property
    def window(self) -> tuple[int | None, int]:
        """(pre_tokens, next_tokens) of attention: the given window, never beyond causality."""
        return self.pre_tokens, 0 if self.next_tokens is None else min(0, self.next_tokens)
