"""Options of Megatron-LM, Megatron-DeepSpeed and MindSpeed-LLM, translated one by one (megatron_options.csv, ADR 0025).

Every option of these trainers has a row. None is dropped: it sets options of HAL, is noted because it changes no
result, or is refused with a reason.
"""

from __future__ import annotations

import csv
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schema import Config, ConfigError, collecting
from .rules import MICROBATCHES, Reading, flag, number_of, take

TABLE = Path(__file__).with_suffix(".csv")
CLASSES = ("implemented", "translated", "noted", "refused")


@dataclass(frozen=True)
class ForeignOption:
    """A row of the table. takes: "" for a switch, a number of values, or "+" for one or more; kind: one of CLASSES.

    A row named "option value" stands for one value of an implemented option that HAL's option does not have.
    """

    name: str
    takes: str
    kind: str
    target: str
    reason: str
    sources: tuple[str, ...]

    @functools.cached_property
    def values(self) -> dict[str, str]:
        """HAL's names for values of an implemented option that have another name elsewhere."""
        pairs = self.target.split() if self.kind == "implemented" else ()
        return dict(pair.split("=", 1) for pair in pairs)

    def accepts(self, words: Sequence[str], given: Mapping[str, object]) -> bool:
        """Whether these values change nothing beside the given options: a noted row without a list accepts all, a
        refused one none, and one with:NAME all unless the option NAME is given, without which nothing reads it."""
        if self.target.startswith("with:"):
            return self.target.removeprefix("with:") not in given
        if not self.target:
            return self.kind == "noted"
        return all(any(_same(word, value) for value in self.target.split()) for word in words) and bool(words)


def _same(word: str, value: str) -> bool:
    try:
        return float(word) == float(value)
    except ValueError:
        return word == value


@functools.cache
def table() -> dict[str, ForeignOption]:
    """The rows by name, without leading dashes and with hyphens."""
    with open(TABLE, newline="", encoding="utf-8") as file:
        rows = [
            ForeignOption(r["option"], r["takes"], r["class"], r["target"], r["reason"], tuple(r["sources"].split()))
            for r in csv.DictReader(file)
        ]
    return {row.name: row for row in rows}


def translate_options(reading: Reading, given: Mapping[str, tuple[str, Sequence[str]]]) -> None:
    """Applies the rows of given options: name -> (the flag as typed, its values). Collects problems in `reading`."""
    refused: dict[str, list[str]] = {}
    ours = {name.replace("_", "-"): value for name, value in {**reading.base, **reading.values}.items()}
    # With one expert, which is the default of Megatron-DeepSpeed, a layer is dense.
    among = {**given, **{name: value for name, value in ours.items() if value and (name, value) != ("num-experts", 1)}}
    for name, (typed, words) in given.items():
        row = table()[name]
        if row.kind == "translated":
            with collecting(reading.problems):
                _set(reading, row, typed, words)
        elif row.accepts(words, among):
            main = row.target.removeprefix("with:") if row.target.startswith("with:") else ""
            reading.noted[typed] = f"only --{main} reads it" if main else row.reason
        else:
            refused.setdefault(row.reason, []).append(" ".join([typed, *words]))
    for reason, typed_options in refused.items():
        reading.problems.append(ConfigError(f"{', '.join(typed_options)}: {reason}", "refused"))
    finish(reading)


def _set(reading: Reading, row: ForeignOption, typed: str, words: Sequence[str]) -> None:
    value: Any = " ".join(words) if words else True
    for target in row.target.replace(";", " ").split():
        name, _, fixed = target.partition("=")
        if name.startswith("@"):
            reading.values[name], reading.origins[name] = value, typed
        else:
            reading.set(name, fixed or value, typed)


def finish(reading: Reading) -> None:
    """Sets the options that depend on several options."""
    for step in (
        _recomputation,
        _gelu,
        _attention,
        _sparse_mode,
        _cuda_graphs,
        half_precision_loss,
        _context_parallel,
        _experts,
        _pipeline,
        _rotary,
        _batch,
        _tokens,
    ):
        with collecting(reading.problems):
            step(reading)
    reading.drop_deferred()


def _recomputation(reading: Reading) -> None:
    """Older names of --recompute-granularity full and its method and chunk size."""
    everything, key = take(reading, "recompute_all")
    chunk, chunk_key = take(reading, "recompute_chunk")
    method, method_key = take(reading, "recompute_method")
    if not (everything or method):
        return  # a chunk size alone has no effect, as in Megatron
    reading.set("recompute_granularity", "full", key or method_key)
    reading.set("recompute_method", method or "uniform", method_key or key)
    reading.set("recompute_num_layers", chunk or 1, chunk_key or key or method_key)


def _gelu(reading: Reading) -> None:
    # With --swiglu and the like the option has no effect, as in Megatron.
    _, x_key = take(reading, "x_model")
    if x_key:
        rows = reading.either("ffn_hidden_size") or 4 * (reading.either("hidden_size") or Config.hidden_size)
        reading.superseded.add("ffn_hidden_size")
        reading.values.pop("ffn_hidden_size", None)
        for option, value in (("ffn_hidden_size", rows // 2), ("geglu", True), ("gelu_approximate", "none")):
            reading.set(option, value, x_key)
    _, key = take(reading, "exact_gelu")
    gated = any(reading.either(name) for name in ("swiglu", "geglu", "squared_relu"))
    if key and not gated:
        reading.set("gelu_approximate", "none", key)


def _attention(reading: Reading) -> None:
    backend, key = take(reading, "attention_backend")
    if key and backend not in ("auto", "flash", "fused", "unfused", "local"):
        raise reading.refuse(key, f"{backend!r} is not one of auto, flash, fused, unfused, local")
    if backend in ("unfused", "local"):
        reading.set("use_flash_attn", False, key)
    elif key:
        reading.noted[key] = "--backend and --pin choose the implementation"
    window, key = take(reading, "window")
    if key:
        left, right = _integers(reading, key, window, 2)
        if left >= 0:
            reading.set("pre_tokens", left, key)
        if right > 0:
            raise reading.refuse(key, f"{window}: attention is causal, so the right end is 0 (or -1)")
    sliding, key = take(reading, "sliding_window")
    if key:
        reading.set("pre_tokens", _integers(reading, key, sliding, 1)[0] - 1, key)
    _, key = take(reading, "input_embeds_norm")
    if key:
        reading.set("embedding_multiplier_scale", float(reading.either("hidden_size") or 0) ** 0.5, key)
    scalar, key = take(reading, "query_pre_attn_scalar")
    if key:
        if number_of(scalar, key) <= 0.0:
            raise reading.refuse(key, f"a number above 0; found {scalar!r}")
        reading.set("softmax_scale", number_of(scalar, key) ** -0.5, key)
    depth, key = take(reading, "scale_depth")
    if key:  # MindSpeed-LLM's transformer_layer.py
        layers = reading.either("num_layers") or Config.num_layers
        reading.set("residual_multiplier", number_of(depth, key) / math.sqrt(layers), key)
    base, key = take(reading, "dim_model_base")
    if key:  # MindSpeed-LLM's gpt_model.py divides the output layer's input by hidden_size / dim_model_base
        width = reading.either("hidden_size") or Config.hidden_size
        reading.set("output_multiplier_scale", number_of(base, key) / width, key)
    _, key = take(reading, "no_position_embedding")
    if key and reading.either("position_embedding_type") not in ("rope", "none"):
        raise reading.refuse(key, "use --position-embedding-type none or rope")


def _sparse_mode(reading: Reading) -> None:
    """The form of the mask of Ascend's flash attention. Only 0 and 4 read the window; the others are the causal mask,
    whole or compressed."""
    mode, key = take(reading, "sparse_mode")
    if not key or mode == "causal":
        return
    if mode not in ("0", "1", "2", "3", "4"):
        raise reading.refuse(key, f"{mode}: 0 and 4 are the window, 1 to 3 the causal mask")
    if mode in "123" and reading.either("pre_tokens") is not None:
        reading.superseded.add("pre_tokens")
        reading.values.pop("pre_tokens", None)
        reading.noted[key] = "this form of the causal mask has no window, so --pre-tokens is not read"
    else:
        reading.noted[key] = "the backend chooses the form of the mask; the window is --pre-tokens and --next-tokens"


def _cuda_graphs(reading: Reading) -> None:
    """Megatron's graph of a full iteration, which leaves the optimizer out as --cuda-graphs does."""
    impl, key = take(reading, "graph_impl")
    scope, scope_key = take(reading, "graph_scope")
    if key and impl not in ("none", "local", "transformer_engine", "full_iteration"):
        raise reading.refuse(key, f"{impl!r} is not one of none, local, transformer_engine, full_iteration")
    if impl == "full_iteration" and scope:
        raise reading.refuse(key, f"a graph of a full iteration holds no parts; remove {scope_key} {scope}")
    if impl == "full_iteration":
        reading.set("cuda_graphs", True, key)
        return
    if impl == "local" and str(scope or "").split() == ["full_iteration"]:
        reading.set("cuda_graphs", True, scope_key)
        return
    for name in filter(None, (key, scope_key)):
        reading.noted[name] = "no graph, or one of single layers, changes no result; a whole step is --cuda-graphs"


def half_precision_loss(reading: Reading) -> None:
    """Megatron's --fp16-lm-cross-entropy, which its own cross entropy does not read: it computes in float32."""
    value, key = take(reading, "fp16_loss")
    if value and not reading.either("fp16"):
        raise reading.refuse(key, "it needs --fp16, as in Megatron")
    if value:
        reading.noted[key] = "the loss is computed in float32, as in megatron-core with this option"


def _context_parallel(reading: Reading) -> None:
    """Megatron's names of the algorithms. Of its two hierarchical sizes the first is that of the groups whose ranks
    exchange heads, the second that of the rings."""
    kind, key = take(reading, "cp_comm_type")
    sizes, sizes_key = take(reading, "hierarchical")
    if not key:
        if sizes_key:
            reading.noted[sizes_key] = "only --cp-comm-type a2a+p2p reads it"
        return
    names = {"p2p": "ring", "a2a": "ulysses", "allgather": "ring", "a2a+p2p": "hybrid"}
    kinds = str(kind).split()
    if len(set(kinds)) != 1 or kinds[0] not in names:
        raise reading.refuse(key, f"one of {', '.join(names)} for all layers; found {kind!r}")
    if (reading.either("context_parallel_size") or 1) == 1:
        reading.noted[key] = "there is no context parallelism"
        return
    reading.set("context_parallel_algo", names[kinds[0]], key)
    if names[kinds[0]] == "hybrid" and sizes_key:
        reading.set("ulysses_degree_in_cp", _integers(reading, sizes_key, sizes, 2)[0], sizes_key)
    elif sizes_key:
        reading.noted[sizes_key] = "only --cp-comm-type a2a+p2p reads it"


def _experts(reading: Reading) -> None:
    """MindSpeed-LLM's names for what Megatron says with several options of experts (features_manager/moe and
    core/transformer/moe/router.py of 26.1.0)."""
    taken = {n: take(reading, n) for n in ("first_dense", "shared_experts", "seq_aux", "norm_topk", "tp_extends_ep")}
    if not reading.either("num_experts"):
        reading.noted |= {key: "only --num-experts reads it" for _, key in taken.values() if key}
        return
    count, key = taken["first_dense"]
    if key and (dense := _integers(reading, key, count, 1)[0]):  # 0 leaves --moe-layer-freq alone
        every = str(reading.either("moe_layer_freq") or 1)
        if not re.fullmatch("-?[1-9][0-9]*", every):
            raise reading.refuse(key, f"--moe-layer-freq {every} names the dense layers, too; give one of them")
        layers = reading.either("num_layers") or Config.num_layers
        pattern = [int(n >= dense and n % int(every) == 0) for n in range(layers)]
        _replace(reading, "moe_layer_freq", str(pattern).replace(" ", ""), key)
    count, key = taken["shared_experts"]
    if key and reading.either("moe_shared_expert_intermediate_size") is None:
        width = reading.either("moe_ffn_hidden_size") or reading.either("ffn_hidden_size")
        if width is None:
            raise reading.refuse(key, "give the width of an expert: --moe-ffn-hidden-size")
        reading.set("moe_shared_expert_intermediate_size", _integers(reading, key, count, 1)[0] * width or None, key)
    if taken["tp_extends_ep"][1]:
        key, tp = taken["tp_extends_ep"][1], reading.either("tensor_model_parallel_size") or 1
        _replace(reading, "expert_model_parallel_size", tp * (reading.either("expert_model_parallel_size") or 1), key)
        _replace(reading, "expert_tensor_parallel_size", 1, key)
    _balancing(reading, taken["seq_aux"][1], taken["norm_topk"][1])


def _balancing(reading: Reading, seq_aux: str, normalized: str) -> None:
    """MindSpeed-LLM's values of --moe-router-load-balancing-type, of which two also choose a softmax of all experts,
    and its options beside them."""
    option = "moe_router_load_balancing_type"
    kinds, key = reading.either(option) or ("aux_loss",), normalized or flag(option)
    before = (reading.either("moe_router_score_function") or "softmax") == "softmax"
    factor = reading.either("moe_router_topk_scaling_factor") not in (None, 1.0)
    if kinds == ("pai_megatron_aux_loss",):
        for name in ("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor"):
            if reading.either(name) is not None:
                reading.noted[flag(name)] = f"{flag(option)} pai_megatron_aux_loss does not read it"
                _drop(reading, name)
        _replace(reading, option, ("aux_loss",), flag(option))
        reading.set("moe_router_pre_softmax", True, flag(option))
    elif kinds == ("softmax_topk",):
        _replace(reading, option, ("none",), flag(option))
        _replace(reading, "moe_router_pre_softmax", not normalized, key)
    elif kinds == ("aux_loss",) and normalized and factor:
        raise reading.refuse(
            normalized,
            "MindSpeed-LLM normalises after it has multiplied by --moe-router-topk-scaling-factor, which then has no "
            "effect; remove one of them",
        )
    elif kinds == ("aux_loss",) and normalized and before and reading.either("moe_router_pre_softmax"):
        _replace(reading, "moe_router_pre_softmax", False, normalized)
    elif kinds == ("group_limited_greedy",):
        _drop(reading, option, "moe_router_num_groups", "moe_router_group_topk")
        raise reading.refuse(
            flag(option),
            "group_limited_greedy chooses groups by their best expert; --moe-router-num-groups by the best of each, as "
            "many as a group gives (DeepSeek-V3)",
        )
    elif kinds == ("sparsemixer_topk",):
        _drop(reading, option)
        raise reading.refuse(flag(option), "sparsemixer_topk draws the second expert at random, which is not available")
    elif normalized:
        reading.noted[normalized] = "probabilities of the chosen experts are normalised without it"
    if seq_aux and kinds == ("none",):
        _replace(reading, option, ("seq_aux_loss",), seq_aux)
    elif seq_aux:
        reading.noted[seq_aux] = f"only {flag(option)} none reads it"


def _replace(reading: Reading, option: str, value: Any, key: str) -> None:
    """Sets an option in the place of the value that was given for it."""
    _drop(reading, option)
    reading.set(option, value, key)


def _drop(reading: Reading, *options: str) -> None:
    """Removes options, wherever they were given."""
    for option in options:
        if reading.values.pop(option, None) is None and option in reading.base:
            reading.superseded.add(option)


def _integers(reading: Reading, key: str, value: Any, count: int) -> list[int]:
    """The `count` integers in a text such as "(128,0)" or, as Python reads them, "1_000"."""
    numbers = [int(n) for n in re.findall(r"-?\d+(?:_\d+)*", str(value))]
    if len(numbers) != count:
        raise reading.refuse(key, f"expected {count} integers, found {value!r}")
    return numbers


def _pipeline(reading: Reading) -> None:
    size, key = take(reading, "positive_pipeline")
    if key and _integers(reading, key, size, 1)[0]:
        reading.set("pipeline_model_parallel_size", size, key)
    stages = reading.either("pipeline_model_parallel_size") or 1
    virtual, key = take(reading, "virtual_stages")
    per_rank = 1
    layers = reading.either("num_layers") or 0
    first, last, embedding, loss = (take(reading, f"stage_{name}") for name in ("first", "last", "embedding", "loss"))
    if key:
        per_rank = _integers(reading, key, virtual, 1)[0]
    elif per_stage := reading.either("num_layers_per_virtual_pipeline_stage"):
        # Megatron counts virtual stages before the embedding and the loss are accounted for.
        counted = layers + bool(embedding[1]) + bool(loss[1])
        per_rank = max(1, counted // (stages * per_stage))
    if any(k for _, k in (first, last)):
        _first_and_last(reading, layers, stages, per_rank, first, last)
    elif embedding[1] or loss[1]:
        _accounted(reading, layers, stages, per_rank, embedding[1], loss[1])
    elif key and per_rank > 1:
        if layers % (stages * per_rank):
            raise reading.refuse(key, f"{stages} x {per_rank} virtual stages do not divide {layers} layers")
        reading.set("num_layers_per_virtual_pipeline_stage", layers // (stages * per_rank), key)
    layout, key = take(reading, "pipeline_layout")
    if key:
        _layout(reading, key, str(layout), stages)


def _set_counts(reading: Reading, key: str, counts: Sequence[int]) -> None:
    reading.superseded.add("num_layers_per_virtual_pipeline_stage")
    reading.set("num_layer_list", ",".join(str(n) for n in counts), key)


def _first_and_last(
    reading: Reading, layers: int, stages: int, per_rank: int, first: tuple[Any, str], last: tuple[Any, str]
) -> None:
    """Megatron's --decoder-first/last-pipeline-num-layers: the layers of the first and last rank of the pipeline."""
    key = first[1] or last[1]
    ends = {place: _integers(reading, k, value, 1)[0] for place, (value, k) in ((0, first), (stages - 1, last)) if k}
    rest, others = layers - sum(ends.values()), stages - len(ends)
    if others < 1 or rest < 0 or rest % others:
        raise reading.refuse(key, f"{rest} layers cannot be shared by the other {others} ranks of the pipeline")
    ranks = [ends.get(rank, rest // others) for rank in range(stages)]
    if any(count % per_rank for count in ranks):
        raise reading.refuse(key, f"{ranks} layers per rank cannot be shared by {per_rank} virtual stages each")
    _set_counts(reading, key, [count // per_rank for _ in range(per_rank) for count in ranks])


def _accounted(reading: Reading, layers: int, stages: int, per_rank: int, embedding: str, loss: str) -> None:
    """Layers are shared as if the embedding and the loss were a layer each."""
    total, parts, key = layers + bool(embedding) + bool(loss), stages * per_rank, embedding or loss
    if total % parts:
        raise reading.refuse(key, f"{total} layers, of which some stand for embedding and loss, in {parts} stages")
    counts = [total // parts] * parts
    counts[0] -= bool(embedding)
    counts[-1] -= bool(loss)
    _set_counts(reading, key, counts)


def _layout(reading: Reading, key: str, text: str, stages: int) -> None:
    """Megatron's --pipeline-model-parallel-layout, e.g. Et*3|(tt|)*2tL: what each stage holds, in order."""
    expanded = text.replace(",", "")
    for _ in range(len(text)):
        expanded, count = re.subn(
            r"\(([^()]*)\)\*(\d+)|([Etml])\*(\d+)|([Etml])\*(\d+)",
            lambda m: (m[1] or m[3] or "") * int(m[2] or m[4] or 1) if int(m[2] or m[4] or 1) < 1000 else "?",
            expanded,
        )
        if not count or len(expanded) > 10_000:
            break
    parts = expanded.split("|")
    if not re.fullmatch(r"E?t*(\|t*)*L?", expanded) or len(parts) % stages:
        raise reading.refuse(
            key, f"{text!r} should be stages of E (embedding), t (layers) and L (loss) in a multiple of {stages} parts"
        )
    _set_counts(reading, key, [part.count("t") for part in parts])


def _rotary(reading: Reading) -> None:
    kind, key = take(reading, "rope_scaling")
    fixed = {"low": 1.0, "high": 4.0}
    if key and kind not in ("llama3", "yarn", "longrope"):
        raise reading.refuse(
            key, f"{kind!r}: rotary positions are plain, or scaled by llama3 (Llama 3.1), yarn or longrope"
        )
    if key and kind == "llama3":
        reading.set("use_rope_scaling", True, key)
    elif key and kind == "longrope":  # MindSpeed-LLM's rotary_pos_embedding.py divides the one length by the other
        longest, first = (reading.either(f"{name}max_position_embeddings") for name in ("", "original_"))
        if not longest or not first:
            raise reading.refuse(
                key, "give --max-position-embeddings and --rope-scaling-original-max-position-embeddings"
            )
        reading.set("rope_type", "longrope", key)
        reading.set("rotary_scaling_factor", int(longest) / int(first), key)
    elif key:
        reading.set("rope_type", "yarn", key)
        factor = reading.either("rope_scaling_factor")  # one name for the factors of both kinds in MindSpeed
        if factor is not None:
            reading.set("rotary_scaling_factor", factor, key)
            reading.superseded.add("rope_scaling_factor")
    for name, usual in fixed.items():
        value, other = take(reading, f"llama3_{name}")
        if other and number_of(value, other) != usual:
            raise reading.refuse(other, f"{value}: Llama 3.1 has {usual:g}, and so has --use-rope-scaling")


def _batch(reading: Reading) -> None:
    count, key = take(reading, "accumulation")
    if key:
        reading.set(MICROBATCHES, _integers(reading, key, count, 1)[0], key)


def _tokens(reading: Reading) -> None:
    """Megatron-DeepSpeed's schedules in tokens, which are sequences times their length. Training ends with the first of
    --train-tokens, --train-samples and --train-iters."""
    length = int(reading.either("seq_length") or 0)
    for name in ("train", "lr_decay", "lr_warmup"):
        tokens, key = take(reading, f"{name}_tokens")
        if not key:
            continue
        count = _integers(reading, key, tokens, 1)[0]
        samples, rest = divmod(count, max(1, length))
        if rest and name == "train":
            samples += 1  # the sequence in which the tokens end
        elif rest:
            samples += 2 * rest >= length
            if abs(samples * length - count) > count / 10_000:
                raise reading.refuse(key, f"{count} tokens are not whole sequences of --seq-length {length}")
            reading.noted[key] = f"rounded to {samples} sequences, which changes learning rates by less than 0.01 %"
        if name == "train":
            iterations, size = reading.either("train_iters"), reading.either("global_batch_size")
            if iterations and size:
                samples = min(samples, iterations * size)
                reading.superseded.add("train_iters")
            samples = min(samples, reading.either("train_samples") or samples)
        if reading.values.pop(f"{name}_samples", None) is None and f"{name}_samples" in reading.base:
            reading.superseded.add(f"{name}_samples")
        reading.set(f"{name}_samples", samples, key)
