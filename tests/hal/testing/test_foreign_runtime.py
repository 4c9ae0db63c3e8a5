"""A runtime that is not torch and compiles for shapes (JAX on the host) is a HAL backend, by public names alone."""

from pathlib import Path

import parallel_runs
import pytest
import torch

import hal
from hal import ops
from hal.model.config.schema import Config
from hal.model.gpt.model import GPT
from hal.model.inference.decoding import complete
from hal.model.inference.engine import Engine
from hal.model.inference.sampling import Sampling
from hal.testing import kit
from hal.testing.processes import run_processes
from hal.testing.purity import backend_rule, check_tree

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "hal_jax"

DENSE = (
    *("linear", "linear_wgrad", "layer_norm", "rms_norm", "rotary", "flash_attention", "scale_mask_softmax"),
    *("swiglu", "geglu", "bias_gelu", "bias_dropout_add", "dropout", "philox_uniform", "embedding", "cross_entropy"),
    *("adamw", "l2norm", "unscale_and_check"),
)
"""The ops of a dense GPT."""

MODELS = {
    "gpt2": {**parallel_runs.GPT2, **parallel_runs.DROPOUT, "num_layers": 2},
    "llama": {**parallel_runs.LLAMA, "num_layers": 2, "num_query_groups": 2, "sequence_parallel": True},
}
STEPS = 20


@pytest.fixture
def site(tmp_path, monkeypatch):
    """The package is installed for this process and its children: on sys.path, with an entry point."""
    pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
    info = tmp_path / "hal_jax-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hal-jax\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[hal.backends]\njax = hal_jax:Jax\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(FOLDER.parent)


@pytest.fixture
def backend(site):
    from hal_jax import Jax

    backend = Jax()
    with hal.activated(backend):
        yield backend


def compilations():
    from hal_jax.runtime import COMPILATIONS

    return COMPILATIONS.total()


def failures(backend, name, examples):
    report = kit.run(backend, ops=[name], examples=examples)
    assert any(row.samples for row in report.rows)
    return [str(row) for row in report.rows if row.status not in ("pass", "declined")]


def test_it_uses_public_names_only():
    assert check_tree(FOLDER, backend_rule("hal_jax"), package="hal_jax") == []


def test_it_is_small():
    assert 300 < sum(len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")) < 700


def test_it_implements_the_ops_of_a_dense_gpt_without_a_waiver(backend):
    assert set(DENSE) <= {name for name, impls in backend.impls.items() if impls}
    assert not any(impl.waivers for impls in backend.impls.values() for impl in impls)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["philox_uniform", "adamw", "unscale_and_check"])
def test_the_kit_passes_on_small_ops(backend, name):
    assert failures(backend, name, 1) == []


@pytest.mark.nightly
def test_the_quick_kit_passes(backend):
    report = kit.run(backend, quick=True)
    assert {row.op for row in report.rows if row.samples} >= set(DENSE)
    assert [str(row) for row in report.rows if row.status not in ("pass", "declined")] == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", [*DENSE, kit.GOLDEN])
def test_the_kit_passes(backend, name):
    assert failures(backend, name, 3) == []


def test_only_a_new_shape_compiles(backend):
    def attend(length, window, seed):
        q = torch.randn(1, 2, length, 4, requires_grad=True)
        how = {"dropout_p": 0.5, "rng": hal.Rng(seed), "pre_tokens": window, "next_tokens": 0}
        ops.flash_attention(q, q, q, layout="BNSD", **how).sum().backward()

    attend(5, 3, 1)
    before = compilations()
    attend(5, 2, 2)
    assert compilations() == before
    attend(6, 3, 1)
    assert compilations() == before + 2  # forward and backward


def test_an_id_outside_the_table_is_an_error_and_not_the_last_row(backend):
    with pytest.raises(IndexError, match="ids from 1 to 3 in a table of 3 rows"):
        ops.embedding(torch.ones(3, 2), torch.tensor([1, 3]))


def losses(name, backend, world):
    """The losses of a model on `world` tensor-parallel processes, which must agree."""
    options = {**MODELS[name], "backend": backend, "tensor_model_parallel_size": world}
    if world == 1:
        options["sequence_parallel"] = False
    # Also one process is a child, because the backend in use is a setting of the whole process.
    per_rank = run_processes(world, parallel_runs.steps, options, STEPS, timeout=300.0)
    assert all(results == per_rank[0] for results in per_rank)
    return [loss for loss, _ in per_rank[0]]


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.nightly), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.nightly)])
def test_a_gpt_trains_as_on_cpu_ref(site, name, world):
    actual, expected = (losses(name, backend, world) for backend in ("jax", "cpu_ref"))
    assert len(actual) == STEPS and actual[-1] != pytest.approx(actual[0], abs=0.1)
    assert actual == pytest.approx(expected, rel=0.0, abs=1e-5)


def generated(prompts, count):
    """The text that a small Llama continues the prompts with, and the log-probabilities of its tokens."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 200, "vocab_size": 101}
    config = Config(**{**parallel_runs.LLAMA, **sizes, "num_query_groups": 2, "init_method_std": 0.3})
    engine = Engine(GPT(config, hal.device()).requires_grad_(False), 101)
    rngs = [hal.Rng(3).fork("prompt", n) for n in range(len(prompts))]
    texts = complete(engine, prompts, count, Sampling(0.7), rngs)
    return [text.ids for text in texts], [token.logprob for text in texts for token in text.tokens]


@pytest.mark.slow
def test_generation_compiles_few_shapes_and_gives_the_text_of_cpu_ref(backend):
    prompts = [[5, 6, 7, 8, 9, 10, 11], [1, 2, 3]]
    with hal.activated(hal.core.registry.make("cpu_ref")):
        expected = generated(prompts, 90)
    before = compilations()
    ids, logprobs = generated(prompts, 90)
    first = compilations() - before
    assert ids == expected[0] and [len(text) for text in ids] == [90, 90]
    assert logprobs == pytest.approx(expected[1], rel=1e-4, abs=1e-4)
    # Of the prompt and of one token: 9 products (of 5 weights, the last of one token only), 4 rotations (queries and
    # keys), norms, activations, ...; attention also for 64 and for 128 keys. A length per token would compile hundreds.
    assert first <= 25
    assert generated([[4, 5, 6, 7, 8], [9, 8, 7, 6]], 85)[0] != ids
    assert compilations() == before + first, "other lengths in the same buckets compile nothing"
