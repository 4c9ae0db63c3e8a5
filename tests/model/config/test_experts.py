"""Options of mixtures of experts: which layers have experts, and what is refused, with all problems in one report."""

import pytest
import torch

from hal.model.config.command_line import parse
from hal.model.config.experts import OPTIONS, coefficients, layer_pattern
from hal.model.config.flops import flops_per_token, idle_parameters
from hal.model.config.schema import ConfigError
from hal.model.gpt.model import GPT

BASE = "--backend cpu_ref --disable-bias-linear --num-experts 8 "


@pytest.mark.parametrize(
    "text, layers",
    [
        ("1", "1111"),
        ("2", "1010"),
        ("3", "1001"),
        ("[0]+[1]*3", "0111"),
        ("([0]+[1])*2", "0101"),
        ("2*[0, 1]", "0101"),
        ("[1,1,1,0]", "1110"),
    ],
)
def test_the_layers_with_experts(text, layers):
    assert layer_pattern(text, 4) == tuple(n == "1" for n in layers)


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "x", "[0]*3", "[2]*4", "[1]*4+1", "[[1]]*4", "print(1)", "[1]*10**9", "[1]*999999999", "(", "1.5"],
)
def test_other_texts_are_refused(text):
    with pytest.raises(ConfigError, match="moe-layer-freq"):
        parse([*BASE.split(), "--moe-layer-freq", text], {})


def test_defaults_follow_from_other_options():
    config = parse(f"{BASE} --ffn-hidden-size 96 --seq-length 64".split(), {})
    assert (config.moe_ffn_hidden_size, config.expert_tensor_parallel_size) == (96, 1)
    assert [config.has_experts(n) for n in range(4)] == [True] * 4
    assert parse(["--backend", "cpu_ref", "--num-experts", "1"], {}).num_experts is None
    several = f"{BASE} --moe-router-load-balancing-type seq_aux_loss aux_loss --moe-aux-loss-coeff 0 1e-2".split()
    assert coefficients(parse(several, {})) == {"aux_loss": 0.01}


WRONG = {
    "--moe-router-topk 9": "exceeds --num-experts 8",
    "--moe-router-topk 1": "needs --moe-router-pre-softmax",
    "--moe-router-group-topk 2": "needs --moe-router-num-groups",
    "--moe-router-num-groups 3 --moe-router-group-topk 1": "not divisible by --moe-router-num-groups 3",
    "--moe-router-num-groups 8 --moe-router-group-topk 1": "shares of at most the 1 experts",
    "--moe-router-enable-expert-bias": "needs --moe-router-score-function sigmoid",
    "--moe-router-load-balancing-type balanced": "must be one or several of aux_loss",
    "--moe-router-load-balancing-type aux_loss none": "none cannot be combined",
    "--moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 1": "sinkhorn has no auxiliary loss",
    "--moe-aux-loss-coeff 1 2": "one number for each",
    "--moe-aux-loss-coeff -1": "must be >= 0",
    "--moe-pad-expert-input-to-capacity": "needs --moe-expert-capacity-factor",
    "--expert-model-parallel-size 3": "not divisible by --expert-model-parallel-size 3",
    "--expert-tensor-parallel-size 3": "not divisible by --expert-tensor-parallel-size 3",
    "--tensor-model-parallel-size 2": "needs --sequence-parallel",
    "--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1 --recompute-granularity full "
    "--recompute-method uniform": "would count twice",
}


@pytest.mark.parametrize("options", WRONG)
def test_what_is_wrong_is_refused(options, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "12")
    with pytest.raises(ConfigError) as caught:
        parse(f"{BASE} --global-batch-size 48 {options}".split(), {})
    assert WRONG[options] in str(caught.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        line = "--backend cpu_ref --num-experts 8 --moe-router-topk 9 --moe-layer-freq x "
        parse(f"{line}--lr 1 --min-lr 2".split(), {})
    for words in ("needs --disable-bias-linear", "exceeds", "--moe-layer-freq", "--min-lr"):
        assert words in str(caught.value)


def test_options_of_experts_without_experts_are_noted():
    notes = " ".join(parse(["--backend", "cpu_ref", "--moe-router-topk", "4", "--moe-per-layer-logging"], {}).notes)
    assert "--moe-router-topk 4 has no effect: it needs --num-experts" in notes and "--moe-per-layer-logging" in notes
    assert all(name.startswith("moe_") for name in OPTIONS.split())


def test_the_experts_of_a_token_count():
    line = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 "
    sizes = f"{line}--num-attention-heads 4 --seq-length 16".split()
    dense = parse([*["--backend", "cpu_ref", "--disable-bias-linear"], *sizes], {})
    sparse = parse([*BASE.split(), *sizes, "--moe-layer-freq", "2", "--moe-ffn-hidden-size", "80"], {})
    more = 64 * (2 * 80 * 2 + 8) - 64 * 128 * 2
    assert flops_per_token(sparse) - flops_per_token(dense) == 6 * more


def test_tiny_moe_has_at_most_the_active_parameters_of_tiny():
    """Counted on the models themselves: of the weights of the experts, as many as a token uses."""
    active, total = {}, {}
    for preset in ("tiny", "tiny-moe"):
        config = parse(["--backend", "cpu_ref", "--config", preset], {})
        config.padded_vocab_size = 384
        parameters = dict(GPT(config, torch.device("meta")).named_parameters())
        total[preset] = sum(p.numel() for p in parameters.values())
        experts = [p.numel() * config.moe_router_topk // p.shape[0] for n, p in parameters.items() if ".experts." in n]
        others = [p.numel() for n, p in parameters.items() if ".experts." not in n]
        active[preset] = sum(experts) + sum(others)
        assert total[preset] - idle_parameters(config) == active[preset]
        assert len(experts) == 2 * sum(config.has_experts(n) for n in range(config.num_layers))
    assert active["tiny"] == total["tiny"] < total["tiny-moe"]
    assert 0.98 * active["tiny"] < active["tiny-moe"] <= active["tiny"]
