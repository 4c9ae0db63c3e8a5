"""The cache changes nothing: logits of tokens fed in pieces are those of the whole sequence, for every model."""

import pytest
import torch

import hal
from hal.model.cache import KeyValueCache
from hal.model.config import Config
from hal.model.gpt import GPT
from hal.model.layers import Parallel

SIZES = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 101}
ROPE = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True, "num_query_groups": 2}
KINDS = {
    "gpt2": {},
    "no-flash-attn": {"use_flash_attn": False},
    "llama": ROPE,
    "llama-interleaved-no-flash-attn": {**ROPE, "rotary_interleaved": True, "use_flash_attn": False},
    "window": {**ROPE, "pre_tokens": 3},
    "window-that-lags": {"pre_tokens": 6, "next_tokens": -1, "use_flash_attn": False},
    "bnsd": {"shape_order": "BNSD"},
    "sandwich": {**ROPE, "use_sandwich_norm": True},
}


def cached(model, tokens, pieces):
    config, layers = model.config, range(model.config.num_layers)
    cache = KeyValueCache(config, layers, len(tokens), tokens.shape[1] + 2, Parallel(), torch.device("cpu"))
    return torch.cat([model(part, cache=cache) for part in tokens.split(pieces, 1)])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_of_pieces_are_those_of_the_whole(cpu_ref, kind):
    model = GPT(Config(**SIZES, **KINDS[kind], init_method_std=0.2), torch.device("cpu"))
    tokens = torch.randint(0, 101, (3, 12), generator=torch.Generator().manual_seed(0))
    whole = model(tokens)
    for pieces in ([12], [5, 7], [1] * 12, [7, 1, 1, 3]):
        torch.testing.assert_close(cached(model, tokens, pieces), whole, rtol=2e-5, atol=2e-5)


def test_sequences_cut_over_ranks_are_refused(references):
    with pytest.raises(hal.ContractError, match="--sequence-parallel"):
        KeyValueCache(Config(**SIZES), range(3), 1, 8, Parallel(sequence=True), torch.device("cpu"))
