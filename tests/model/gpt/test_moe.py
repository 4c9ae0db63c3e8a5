"""A GPT with experts: it learns, generates as it evaluates, balances its load, reports it, and resumes bit-equal."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from parallel_runs import DEEPSEEK, MIXTRAL, stored_values, trainer

import hal
from hal.model.apps.html_report.page import build_page
from hal.model.apps.html_report.record import read_runs
from hal.model.gpt.kv_cache import KeyValueCache
from hal.model.gpt.moe import routers
from hal.model.training.expert_load import ExpertReport
from hal.model.training.run import train

EXPERTS = {
    "disable_bias_linear": True,
    "swiglu": True,
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


def test_a_run_learns_and_reports_the_load_of_its_experts(tiny: Any, cpu_ref: Any, tmp_path: Any) -> None:
    given = {"moe_per_layer_logging": True, "moe_z_loss_coeff": 1e-3, "sample_tokens": 8, "train_iters": 30}
    folder = tmp_path / "run"
    run = train(tiny(backend="cpu_ref", run_dir=str(folder), **EXPERTS, **given))
    record = json.loads((folder / "run.json").read_text())
    losses = [loss for _, loss in record["losses"]]
    assert losses[-1] < losses[0] - 0.5
    (_, loads), layers = record["expert_loads"][-1], run.config.num_layers
    assert len(loads) == layers and all(math.isclose(sum(shares), 1.0) for shares in loads.values())
    assert all(1.0 <= value <= 4.0 for _, value in record["expert_imbalance"])
    assert all(0.0 < value <= 1.0 for _, value in record["router_entropy"])
    assert (folder / "sample.txt").read_text()
    page = build_page(read_runs([folder]))
    assert "Largest load of an expert" in page and "Entropy of the router" in page


def test_a_resumed_run_is_bit_equal(tiny: Any, cpu_ref: Any, tmp_path: Any) -> None:
    def run(folder: str, iters: int, **given: Any) -> Any:
        options = {**EXPERTS, "backend": "cpu_ref", "run_dir": str(tmp_path / folder), "sample_tokens": 0}
        return train(tiny(**options, train_iters=iters, lr_decay_iters=6, **given))

    whole = run("whole", 6)
    run("first", 3, save=str(tmp_path / "saved"))
    resumed = run("second", 6, load=str(tmp_path / "saved"))
    values, again = stored_values(whole), stored_values(resumed)
    assert values.keys() == again.keys() and all(torch.equal(values[n], again[n]) for n in values)
    assert any(n.endswith(".mlp.router.expert_bias") and v.any() for n, v in values.items())


@pytest.mark.parametrize("options", [MIXTRAL, DEEPSEEK], ids=["mixtral", "deepseek"])
def test_generation_computes_what_a_full_pass_does(options: dict[str, Any], cpu_ref: Any) -> None:
    model = trainer(options).model
    tokens = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    cache = KeyValueCache(model.config, range(model.config.num_layers), 2, 9, model.parallel, hal.device())
    with torch.no_grad():
        full = model(tokens)
        steps = [model(tokens[:, :4], cache=cache), *(model(tokens[:, i : i + 1], cache=cache) for i in range(4, 9))]
    torch.testing.assert_close(torch.cat(steps), full, rtol=1e-5, atol=1e-5)


def _imbalance(options: dict[str, Any]) -> float:
    """The largest load by the mean load, after training on a router that prefers few experts. Loads are those of the
    last ten steps together, because a step has few tokens; the result is the mean over layers.
    """
    run = trainer({**MIXTRAL, "moe_router_topk": 1, "moe_router_pre_softmax": True, "global_batch_size": 4, **options})
    with torch.no_grad():
        for router in routers(run.model).values():
            router.weight[0] += 0.3 * router.weight.abs().mean()
            router.weight[:2] *= 3.0
    loads = []
    for _ in range(25):
        experts = run.step().experts
        assert experts is not None
        loads.append(torch.tensor(list(experts.load.values())))
    load = torch.stack(loads[-10:]).mean(0)
    return float((load.amax(1) / load.mean(1)).mean())


@pytest.mark.slow
def test_losses_and_biases_balance_the_load(cpu_ref: Any) -> None:
    none = {"moe_router_load_balancing_type": ("none",), "moe_aux_loss_coeff": ("0.0",)}
    bias = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.02}
    sigmoid = {"moe_router_pre_softmax": False, "moe_router_score_function": "sigmoid"}
    assert _imbalance({"moe_aux_loss_coeff": ("0.5",)}) < _imbalance(none) - 0.2
    assert _imbalance({**none, **sigmoid, **bias}) < _imbalance({**none, **sigmoid}) - 0.2


def test_a_collapsed_router_is_recognised() -> None:
    def report(*shares: float) -> ExpertReport:
        return ExpertReport({3: list(shares)}, {3: 0.5}, {}, 0.0)

    assert report(0.5, 0.5, 0.0, 0.0, 0.0, 0.0).collapsed(2) == [3]
    assert report(0.49, 0.49, 0.02, 0.0, 0.0, 0.0).collapsed(2) == [3]
    assert report(0.3, 0.3, 0.2, 0.1, 0.1, 0.0).collapsed(2) == []
    assert report(0.5, 0.5, 0.0).collapsed(2) == [], "three experts of which each token uses two"


def test_a_collapsed_router_is_warned_of_once(tiny: Any, cpu_ref: Any, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(ExpertReport, "collapsed", lambda self, topk: [1])
    train(tiny(backend="cpu_ref", **EXPERTS, train_iters=4, log_interval=2, sample_tokens=0))
    text = capsys.readouterr().out
    assert text.count("the routers of layers 1 have collapsed") == 1
