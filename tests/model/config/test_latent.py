"""Contradictions between the options of latent attention, YaRN and others, and options that nothing reads."""

import pytest
from model_options import LATENT_OPTIONS

from hal.model.config.command_line import build, parse
from hal.model.config.schema import ConfigError

BASE = {"backend": "cpu_ref", "num_attention_heads": 4}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"num_query_groups": 2}, "remove --num-query-groups 2"),
        ({"qk_pos_emb_head_dim": 5}, "--qk-pos-emb-head-dim 5 must be even"),
        ({"rotary_interleaved": True}, "--rotary-interleaved"),
        ({"use_rope_scaling": True}, "give --rope-type yarn"),
        ({"rope_type": "rope"}, "--mscale-all-dim 0.7 scales attention for YaRN"),
        ({"rotary_base": 1.0}, "--rope-type yarn needs a --rotary-base above 1"),
        ({"beta_fast": 0.5}, "--beta-fast 0.5 is below --beta-slow 1.0"),
        ({"rope_type": "longrope"}, "--rope-type longrope is for models without --multi-latent-attention"),
        ({"rotary_seq_len_interpolation_factor": 2.0}, "are scaled in one way; give one of them"),
        ({"kv_lora_rank": 0}, "--kv-lora-rank must be in 1..1048576"),
    ],
)
def test_contradictions(options, words):
    with pytest.raises(ConfigError, match=words):
        build({**BASE, **LATENT_OPTIONS, "rope_type": "yarn", **options})


@pytest.mark.parametrize(
    "options, words",
    [
        ({"long_factor": ("1.0",)}, "needs 8 positive numbers in --long-factor; found 1.0"),
        ({"short_factor": ("1.0",) * 7 + ("x",)}, "needs 8 positive numbers in --short-factor; found 1.0,"),
        ({"short_factor": ("1.0",) * 7 + ("0",)}, "needs 8 positive numbers in --short-factor"),
        ({"use_rope_scaling": True}, "--use-rope-scaling and --rope-type longrope: rotary positions are scaled in one"),
        ({"original_max_position_embeddings": 1}, "--original-max-position-embeddings of at least 2"),
    ],
)
def test_contradictions_of_longrope(options, words):
    right = {"rope_type": "longrope", "rotary_percent": 0.25, "short_factor": ("1.0",) * 8, "long_factor": ("2",) * 8}
    right = {**BASE, "position_embedding_type": "rope", **right}
    build(right)
    with pytest.raises(ConfigError, match=words):
        build({**right, **options})


def test_llama_3_has_one_original_length():
    rope = {**BASE, "position_embedding_type": "rope", "use_rope_scaling": True}
    with pytest.raises(ConfigError, match="--original-max-position-embeddings 4096: Llama 3"):
        build({**rope, "original_max_position_embeddings": 4096})
    build({**rope, "original_max_position_embeddings": 8192})


def test_sizes_of_heads_are_their_own():
    """The hidden size need not be a multiple of the number of heads."""
    config = build({**BASE, **LATENT_OPTIONS, "hidden_size": 30})
    assert config.head_sizes == (12, 6) and config.rope_type == "yarn"
    assert build(BASE).head_sizes == (64, 64) and build(BASE).rope_type == "rope"


@pytest.mark.parametrize(
    "line, words",
    [
        ("--kv-lora-rank 8", "--kv-lora-rank 8 has no effect: it needs --multi-latent-attention"),
        ("--mscale 2", "--mscale 2.0 has no effect: it needs --rope-type yarn"),
        ("--multi-latent-attention --position-embedding-type rope --kv-channels 8", "--kv-channels 8 has no effect"),
        ("--multi-latent-attention --position-embedding-type rope --rotary-percent 0.5", "--rotary-percent 0.5 has no"),
    ],
)
def test_what_nothing_reads_is_noted(line, words):
    assert any(words in note for note in parse(line.split(), {}).notes)
