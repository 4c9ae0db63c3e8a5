"""Forward passes under any layout give the text and scores of one process; unsupported layouts are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parallel_runs
import pytest
import torch

import hal
from hal.mesh import Mesh
from hal.model.checkpoint import reader
from hal.model.config.command_line import build
from hal.model.config.parallel_layout import make_parallel_layout
from hal.model.config.validation import check_model, world_size
from hal.model.inference.decoding import complete
from hal.model.inference.engine import Engine
from hal.model.inference.sampling import Sampling
from hal.testing.processes import run_processes

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


def engine(options: dict[str, Any]) -> Engine:
    hal.use("cpu_ref")
    config = build(options, check_model)
    config.set_vocabulary(121)
    layout = make_parallel_layout(config, world_size(config))
    mesh = Mesh(layout.layout, hal.backend(), timeout=60.0)
    return Engine.build(config, 121, mesh, layout)


def _save(options: dict[str, Any], root: str) -> None:
    run = parallel_runs.trainer(options)
    run.save(Path(root))


def _loaded(options: dict[str, Any], root: str) -> list[float]:
    """Logits after a prompt, of the checkpoint in `root`, on the leader of the last stage."""
    model = engine({**options, "seed": 99})  # so that the weights come from the checkpoint
    model.load(reader.folder_of(Path(root), 0))
    logits = model.next_logits(torch.tensor([PROMPTS[0]]), None)
    return model.broadcast_from_last_stage(logits, torch.zeros(1, 121)).flatten().tolist()


@pytest.mark.parametrize(
    "base",
    [
        pytest.param(parallel_runs.GPT2, id="tied"),
        pytest.param(parallel_runs.LLAMA, id="untied", marks=pytest.mark.nightly),
        pytest.param(parallel_runs.DEEPSEEK, id="experts", marks=pytest.mark.slow),
    ],
)
def test_every_rank_loads_its_part_of_a_checkpoint(base: dict[str, Any], tmp_path: Path) -> None:
    """The last stage's copy of a tied weight is sharded, too, and stored under the first stage's name."""
    _save(base, str(tmp_path))
    one = _loaded(base, str(tmp_path))
    for logits in run_processes(4, _loaded, {**base, **parallel_runs.TP2, **parallel_runs.PP2}, str(tmp_path)):
        assert logits == pytest.approx(one, abs=1e-4)


def texts(options: dict[str, Any]) -> list[Any]:
    model = engine(options)
    rngs = [hal.Rng(5).fork(n) for n in range(len(PROMPTS))]
    samplings = Sampling(0.0), Sampling(1.1, top_p=0.9)
    return [
        [(c.reason, [(t.id, round(t.logprob, 4)) for t in c.tokens]) for c in completions]
        for completions in (complete(model, PROMPTS, 24, s, rngs, ends=[120]) for s in samplings)
    ]


def scores(options: dict[str, Any]) -> Any:
    model = engine(options)
    draw = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, 121, (2, 3, 13), generator=draw).unbind()
    counted = torch.rand(3, 13, generator=draw) < 0.7
    labels[0, :4] = 7
    return model.total(
        torch.cat([model.score(*(x[i : i + 1] for x in (tokens, labels, counted))) for i in range(3)])
    ).tolist()


def on(world: int, function: Any, options: dict[str, Any]) -> Any:
    if world == 1:
        return function(options)
    per_rank = run_processes(world, function, options, timeout=180.0)
    assert all(str(r) == str(per_rank[0]) for r in per_rank), "the ranks disagree"
    return per_rank[0]


GENERATING = {
    "tp2-scaled": (2, parallel_runs.SCALED, parallel_runs.TP2),
    "tp2-llama": (2, parallel_runs.LLAMA, parallel_runs.TP2),
    "pp2-gpt2": (2, parallel_runs.GPT2, parallel_runs.PP2),
    "etp2-mixtral": (2, parallel_runs.MIXTRAL, parallel_runs.TP2),
    "ep2-tp2-deepseek": (2, parallel_runs.DEEPSEEK, {**parallel_runs.TP2, **parallel_runs.EP2, **parallel_runs.ETP1}),
    "tp2-pp2-latent": (4, parallel_runs.LATENT, {**parallel_runs.TP2, **parallel_runs.PP2}),
    "tp2-pp2-gpt2": (4, parallel_runs.GPT2, {**parallel_runs.TP2, **parallel_runs.PP2}),
    "tp2-pp2-llama": (4, parallel_runs.LLAMA, {**parallel_runs.TP2, **parallel_runs.PP2}),
}
QUICK = {"tp2-llama", "pp2-gpt2"}


def cases(table: dict[str, Any], slow: set[str]) -> list[Any]:
    """The rows of the table as parameters; those that are neither quick nor slow run every night."""
    marks = {**dict.fromkeys(QUICK, ()), **dict.fromkeys(slow, pytest.mark.slow)}
    return [pytest.param(*v, id=k, marks=marks.get(k, pytest.mark.nightly)) for k, v in table.items()]


@pytest.mark.parametrize("world, base, layout", cases(GENERATING, {"ep2-tp2-deepseek", "tp2-pp2-llama"}))
def test_a_seed_gives_the_same_text_on_every_layout(world: int, base: Any, layout: Any) -> None:
    got, want = on(world, texts, {**base, **layout}), on(1, texts, base)
    for greedy_or_drawn in (0, 1):
        for (reason, tokens), (reason_one, tokens_one) in zip(got[greedy_or_drawn], want[greedy_or_drawn]):
            assert reason == reason_one and [i for i, _ in tokens] == [i for i, _ in tokens_one]
            assert [p for _, p in tokens] == pytest.approx([p for _, p in tokens_one], abs=2e-4)


SCORING = {
    **GENERATING,
    "cp2-latent": (2, parallel_runs.LATENT_DENSE, parallel_runs.CP2),
    "cp2-llama": (2, parallel_runs.LLAMA, parallel_runs.CP2),
    "ulysses-gpt2": (2, parallel_runs.GPT2, parallel_runs.ULYSSES),
}


@pytest.mark.parametrize("world, base, layout", cases(SCORING, {"ep2-tp2-deepseek", "cp2-llama", "ulysses-gpt2"}))
def test_scores_are_those_of_one_process(world: int, base: Any, layout: Any) -> None:
    got, want = (torch.tensor(on(*how)) for how in ((world, scores, {**base, **layout}), (1, scores, base)))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    assert (got[:, 1:] == want[:, 1:]).all()


def _refused(options: dict[str, Any]) -> str:
    with pytest.raises(hal.ContractError) as error:
        texts(options)
    return str(error.value)


@pytest.mark.slow
def test_generation_with_sequences_cut_over_ranks_is_refused() -> None:
    assert "--context-parallel-size 1" in on(2, _refused, {**parallel_runs.LLAMA, **parallel_runs.CP2})
