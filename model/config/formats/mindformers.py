"""The nested YAML of the MindFormers tutorial: train_config, accelerate_config, model_config.llm.

Its schema is not published; mindformers.yaml has the keys of the tutorial. `kv_group_size` is read as the number of
key/value heads (`num_query_groups`). A note tells the user, since the name could also mean query heads per group.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from .mindspeed import CHOICES, biases, pipeline, residual
from .rules import Reading, Rule, int_of, load_rules, take

SECTIONS = ("train_config", "accelerate_config", "model_config")


@functools.cache
def rules() -> dict[str, Rule]:
    """The rule of every key."""
    functions = {"fused_operators": _operators(True), "nofused_operators": _operators(False)}
    return load_rules(Path(__file__).with_name("mindformers.yaml"), CHOICES, functions)


def _operators(fused: bool) -> Rule:
    """The rule for a list of operators that MindFormers fuses (or does not fuse)."""

    def rule(reading: Reading, key: str, value: Any) -> None:
        names = value if isinstance(value, list) else str(value or "").split(",")
        for name in (str(n).strip() for n in names if n):
            if name == "flash_attention":
                reading.set("use_flash_attn", fused, key)
            elif name == "masked_softmax":
                reading.note(key, "masked_softmax is used where flash attention is not")
            elif name in ("rope", "rmsnorm", "swiglu", "gradient_accumulation"):
                if not fused:
                    reading.note(key, f"the backend decides whether {name} is fused; --pin selects an implementation")
            else:
                raise reading.refuse(key, f"there is no operator {name!r}")

    return rule


def finish(reading: Reading) -> None:
    """Sets the options that depend on several keys."""
    values = reading.values
    shared, key = take(reading, "shared")
    if key:
        if not isinstance(shared, bool):
            raise reading.refuse(key, f"True or False; found {shared!r}")
        reading.set("untie_embeddings_and_output_weights", not shared, key)
    _groups(reading)
    residual(reading)
    divided, key = take(reading, "divided_by")
    if key and values.get("pad_vocab_size_to", 0) % int_of(divided, f"{reading.file}: {key}"):
        raise reading.refuse(key, f"padded_size {values['pad_vocab_size_to']} is not divisible by {divided}")
    if key and "pad_vocab_size_to" not in values:
        reading.set("make_vocab_size_divisible_by", divided, key)
    resume, key = take(reading, "resume")
    if resume is True:
        raise reading.refuse(
            key, "True; the tutorial does not specify the source. Give --load FOLDER and remove the key"
        )
    biases(reading)
    pipeline(reading)


def _groups(reading: Reading) -> None:
    groups, key = take(reading, "kv_groups")
    kind, kind_key = take(reading, "attention_type")
    if kind_key and kind not in ("GQA", "MHA", "MQA"):
        raise reading.refuse(kind_key, f"GQA, MHA or MQA; found {kind!r}")
    if kind == "MQA":
        reading.set("num_query_groups", 1, kind_key)
    if kind == "MHA" and key and groups != reading.values.get("num_attention_heads"):
        raise reading.refuse(key, f"{groups} groups, but {kind_key} is MHA: one group per head. Remove one of them")
    if kind == "GQA" and not key:
        raise reading.refuse(kind_key, "GQA needs kv_group_size")
    if key and kind != "MHA":
        reading.set("num_query_groups", groups, key)
        reading.note(key, f"read as {groups} key/value heads (--num-query-groups), not as heads per group")
