"""The thin GPT as one graph: torch.compile without a break, with dropout whose numbers are inputs of the graph."""

import pytest
import torch
from model_options import LLAMA_OPTIONS

import hal
from hal import Rng, TensorRng
from hal.model.config.command_line import build
from hal.model.gpt.dropout_rng import DropoutRng
from hal.model.gpt.model import GPT

SIZES = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "seq_length": 24}
GPT2 = {**SIZES, "attention_dropout": 0.1, "hidden_dropout": 0.1}
LLAMA = {**SIZES, **LLAMA_OPTIONS, "num_query_groups": 2}


@pytest.fixture(autouse=True)
def fresh():
    hal.use("cpu_ref")
    torch._dynamo.reset()


def model(options):
    config = build({"tokenizer_type": "NullTokenizer", "vocab_size": 100, "data_path": "unused", **options})
    return GPT(config, torch.device("cpu"))


def batch(seed):
    ids = torch.randint(0, 100, (2, 25), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def gradients(gpt, loss):
    names, parameters = zip(*gpt.named_parameters())
    return dict(zip(names, torch.autograd.grad(loss, parameters)))


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        pytest.param(GPT2, "aot_eager", marks=pytest.mark.slow, id="GPT-2, dropout"),
        pytest.param(LLAMA, "aot_eager", marks=pytest.mark.nightly, id="Llama"),
        pytest.param(GPT2, "inductor", marks=pytest.mark.nightly, id="GPT-2, dropout, inductor"),
        pytest.param(LLAMA, "inductor", marks=pytest.mark.nightly, id="Llama, inductor"),
    ],
)
def test_a_training_step_is_one_graph_and_equals_eager(options, backend):
    gpt, graphs = model(options), []

    def counted(graph, example):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, example)

    def loss(tokens, labels, rng):
        return gpt.loss(gpt(tokens, DropoutRng(rng, 0, 2)), labels).mean()

    compiled = torch.compile(loss, fullgraph=True, backend=counted)
    for step in range(3):
        tokens, labels = batch(step)
        eager = loss(tokens, labels, Rng(step))
        traced = compiled(tokens, labels, TensorRng.of(Rng(step)))
        torch.testing.assert_close(traced, eager, rtol=1e-6, atol=1e-6)
        expected, got = gradients(gpt, eager), gradients(gpt, traced)
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-6)
    assert len(graphs) == 1  # new random numbers are not a new graph
