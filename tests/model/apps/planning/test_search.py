"""The planner never offers a layout that the trainer refuses, and its options give the layout that the trainer runs."""

from __future__ import annotations

import functools
import shlex
from typing import Any

import pytest

from hal import Capabilities
from hal.core.registry import load
from hal.model.apps.planning import plan_report
from hal.model.apps.planning.memory import memory
from hal.model.apps.planning.search import SearchResult, best_of_each, require_some, search, set_vocabulary
from hal.model.apps.planning.shape import Shape
from hal.model.apps.planning.traffic import traffic
from hal.model.config.command_line import build, read
from hal.model.config.parallel_layout import make_parallel_layout, problems
from hal.model.config.schema import Config, ConfigError
from hal.model.config.validation import check_model

H100 = load("cuda").device_specs[0]
MODEL = "--config llama-70b --seq-length 2048 --global-batch-size 256"


@functools.cache
def run_search(
    devices: int, options: str = MODEL, limit: float = H100.memory, **capabilities: Any
) -> tuple[Config, SearchResult]:
    config = build(read(shlex.split(options), {}, showing=True), check_model)
    set_vocabulary(config)
    return config, search(config, devices, H100, limit, Capabilities(**capabilities))


@pytest.mark.slow
def test_what_is_offered_is_what_the_trainer_runs(monkeypatch) -> None:
    _, result = run_search(64)
    assert result.fits and result.too_large and result.refused
    monkeypatch.setenv("WORLD_SIZE", "64")
    for option in best_of_each(result.fits + result.too_large):
        assert not list(problems(option.config, 64))
        again = build(read(shlex.split(f"{MODEL} --data-path tokens {plan_report.flags(option)}"), {}))
        set_vocabulary(again)
        plan = make_parallel_layout(again, 64)
        assert plan == option.plan
        assert memory(again, plan) == option.memory


def test_experts_that_are_offered_are_what_the_trainer_runs(monkeypatch) -> None:
    model = (
        "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --global-batch-size 64 --bf16 --swiglu "
        "--disable-bias-linear --num-experts 8 --moe-layer-freq [0]+[1]*7 --zero-stage 1"
    )
    _, result = run_search(8, model)
    assert {(o.plan.layout.ep, o.plan.layout.etp) for o in result.fits} >= {(1, 1), (8, 1), (2, 2), (1, 4)}
    monkeypatch.setenv("WORLD_SIZE", "8")
    for option in best_of_each(result.fits):
        again = build(read(shlex.split(f"{model} --data-path tokens {plan_report.flags(option)}"), {}))
        set_vocabulary(again)
        plan = make_parallel_layout(again, 8)
        assert plan == option.plan
        assert memory(again, plan) == option.memory


@pytest.mark.slow
def test_they_come_in_order_and_within_the_limit() -> None:
    _, result = run_search(64, limit=60e9)
    seconds = [o.estimate.seconds for o in result.fits]
    assert seconds == sorted(seconds) and all(o.memory.total <= 60e9 for o in result.fits)
    missing = [o.memory.total for o in result.too_large]
    assert missing == sorted(missing) and missing[0] > 60e9


def test_options_that_are_given_are_kept() -> None:
    given = f"{MODEL} --tensor-model-parallel-size 4 --zero-stage 1 --micro-batch-size 2 --recompute-granularity full"
    _, result = run_search(64, given)
    assert result.fits
    for o in result.fits + result.too_large:
        assert (o.plan.layout.tp, o.plan.zero, o.config.micro_batch_size) == (4, 1, 2)
        assert plan_report.recomputation(o.config) == "all"


@pytest.mark.nightly
def test_more_memory_never_takes_a_layout_away() -> None:
    names = [{plan_report.name(o) for o in run_search(32, limit=limit)[1].fits} for limit in (40e9, 80e9, 160e9)]
    assert names[0] < names[1] < names[2]


def test_no_legal_layout_is_an_error_with_the_commonest_reason() -> None:
    _, result = run_search(7)
    with pytest.raises(ConfigError, match=r"on 7 devices is legal.*not divisible"):
        require_some(result, 7)


def test_a_vocabulary_that_cannot_be_known_says_what_to_give() -> None:
    config = build(read(["--tokenizer-type", "GPT2BPETokenizer"], {}), check_model)
    with pytest.raises(ConfigError, match="--tokenizer-type NullTokenizer --vocab-size N"):
        set_vocabulary(config)


def sent(options: str, devices: int):
    config = build(read(shlex.split(f"{MODEL} {options}"), {}, showing=True), check_model)
    set_vocabulary(config)
    return traffic(Shape.of(config, make_parallel_layout(config, devices)))


def test_traffic_by_hand() -> None:
    hidden = 2048 * 8192 * 2  # bytes of one sequence between the layers
    traffic = sent("--tensor-model-parallel-size 8", 8)
    # Four all-reduces per layer and microbatch, and one at each end of the model; each sends 2 * 7/8 of its bytes.
    assert traffic.tensor == 256 * (4 * 80 + 2) * 2 * 7 / 8 * hidden
    assert (traffic.data, traffic.pipeline, traffic.context, traffic.tied) == (0, 0, 0, 0)
    # A middle stage of four forwards the hidden state of every microbatch, and sends its gradient back.
    assert sent("--pipeline-model-parallel-size 4", 4).pipeline == 2 * 256 * hidden
    parameters = 68_976_648_192
    assert sent("", 4).data == 2 * 3 / 4 * 4 * parameters
    assert sent("--zero-stage 1", 4).data == 3 / 4 * (4 + 2) * parameters
    ring = sent("--context-parallel-size 2", 2)
    keys = 1024 * 8 * 128 * 2 * 2  # a rank's keys and values, in bytes
    # They are sent one step in the forward and one in the backward pass, and their float32 gradients two steps.
    assert ring.context == 256 * 80 * (2 * keys + 2 * 2 * keys)


@pytest.mark.slow
def test_layouts_with_tensors_beyond_the_devices_limit_are_refused() -> None:
    _, free = run_search(64)
    config, limited = run_search(64, max_elements=2048 * 128256 // 8)
    offered = {plan_report.name(o) for o in limited.fits}
    assert offered < {plan_report.name(o) for o in free.fits}
    for option in limited.fits:
        rows = config.seq_length // option.plan.layout.cp * option.config.micro_batch_size
        assert rows * option.config.padded_vocab_size // option.plan.layout.tp <= 2048 * 128256 // 8
    assert any("the logits" in text for text in limited.refused)
