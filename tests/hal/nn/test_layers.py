"""hal.nn's layers have torch's signatures, state-dict names and results; `convert` puts them into a model."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hal
import hal.nn

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[0, 3, 1, 3], [2, 0, 6, 5]])

LAYERS = {
    "Linear": ((8, 6), {}, (X,)),
    "Linear without bias": ((8, 6), {"bias": False}, (X,)),
    "LayerNorm": ((8,), {"eps": 1e-3}, (X,)),
    "LayerNorm without bias": ((8,), {"bias": False}, (X,)),
    "RMSNorm": ((8,), {}, (X,)),
    "RMSNorm with eps": ((8,), {"eps": 1e-2}, (0.01 * X,)),
    "Embedding": ((7, 8), {}, (IDS,)),
    "Embedding with padding": ((7, 8), {"padding_idx": 0}, (IDS,)),
    "GELU": ((), {}, (X,)),
    "GELU by tanh": ((), {"approximate": "tanh"}, (X,)),
    "CrossEntropyLoss": ((), {}, (X.flatten(0, 1), IDS.flatten().repeat(2)[:10])),
    "CrossEntropyLoss ignoring a class": ((), {"ignore_index": 3}, (X[:, :4].transpose(1, 2), IDS)),
    "CrossEntropyLoss smoothed": ((), {"label_smoothing": 0.2}, (X[0], IDS.flatten()[:5])),
    "CrossEntropyLoss, sum": ((), {"reduction": "sum", "ignore_index": 2}, (X[:, :4].transpose(1, 2), IDS)),
    "CrossEntropyLoss, none": ((), {"reduction": "none"}, (X[0], IDS.flatten()[:5])),
    "CrossEntropyLoss of one": ((), {}, (X[0, 0], IDS[0, 1])),
}


def gradients(layer, inputs):
    inputs = [t.clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    result = layer(*inputs)
    (result * torch.linspace(1.0, 2.0, result.numel()).reshape(result.shape)).sum().backward()
    return result.detach(), [t.grad for t in (*inputs, *layer.parameters()) if t.requires_grad]


@pytest.mark.parametrize("case", LAYERS)
def test_a_layer_is_torchs_with_equal_results_and_gradients(case, cpu_ref):
    name = case.replace(",", " ").split()[0]
    arguments, options, inputs = LAYERS[case]
    theirs, ours = (getattr(module, name)(*arguments, **options) for module in (nn, hal.nn))
    assert isinstance(ours, getattr(nn, name))
    assert inspect.signature(type(ours).__mro__[2].__init__) == inspect.signature(type(theirs).__init__)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(theirs.state_dict())
    (expected, wanted), (result, grads) = gradients(theirs, inputs), gradients(ours, inputs)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize("case", ["Linear", "LayerNorm", "CrossEntropyLoss"])
def test_under_autocast_results_have_torchs_dtype(case, cpu_ref):
    arguments, options, inputs = LAYERS[case]
    theirs = getattr(nn, case)(*arguments, **options)
    ours = getattr(hal.nn, case)(*arguments, **options)
    ours.load_state_dict(theirs.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(*inputs), theirs(*inputs), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: hal.nn.Embedding(7, 8, max_norm=1.0), "max_norm=1.0"),
        (lambda: hal.nn.LayerNorm((5, 8)), "over 2 dimensions"),
        (lambda: hal.nn.RMSNorm(8, elementwise_affine=False), "leaves no weight"),
        (lambda: hal.nn.CrossEntropyLoss(weight=torch.ones(8)), "weights per class"),
        (lambda: hal.nn.RotaryEmbedding(7), "even"),
    ],
)
def test_options_without_a_counterpart_are_refused(make, reason, cpu_ref):
    with pytest.raises(hal.ContractError, match=reason):
        make()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.7},
        {"attn_mask": torch.randn(5, 7, generator=torch.Generator().manual_seed(1)), "scale": 0.3},
        {"enable_gqa": True},
    ],
    ids=["plain", "causal", "mask", "bias", "gqa"],
)
def test_attention_equals_torchs(options, cpu_ref):
    draw = torch.Generator().manual_seed(2)
    heads = 2 if "enable_gqa" in options else 4
    tensors = [torch.randn(2, n, s, 8, generator=draw) for n, s in ((4, 5), (heads, 7), (heads, 7))]
    results = []
    for function in (F.scaled_dot_product_attention, hal.nn.scaled_dot_product_attention):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = function(*leaves, **options)
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in leaves)])
    torch.testing.assert_close(results[1], results[0])
    names = list(inspect.signature(hal.nn.scaled_dot_product_attention).parameters)
    assert names == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]


def test_attention_refuses_what_torch_refuses(cpu_ref):
    q, k = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 3, 8)
    with pytest.raises(hal.ContractError, match="enable_gqa"):
        hal.nn.scaled_dot_product_attention(q, k, k)
    with pytest.raises(hal.ContractError, match="not both"):
        hal.nn.scaled_dot_product_attention(q, q, q, torch.ones(3, 3, dtype=torch.bool), is_causal=True)


def test_rotary_embedding_turns_pairs_by_their_position(cpu_ref):
    layer = hal.nn.RotaryEmbedding(8, base=100.0)
    assert layer.state_dict() == {}
    x = torch.randn(1, 2, 3, 8)
    angle = torch.arange(3.0)[:, None] * 100.0 ** (-torch.arange(0.0, 8.0, 2.0) / 8)
    turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(layer(x), torch.cat([turned.real, turned.imag], -1))
    torch.testing.assert_close(layer(x, torch.arange(3)[None]), layer(x))


class Own(nn.Linear):
    def forward(self, input):
        return super().forward(input) * 2


def network():
    torch.manual_seed(0)
    tied = nn.Linear(8, 7, bias=False)
    model = nn.Sequential(
        nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Tanh(), Own(8, 8), nn.RMSNorm(8), tied
    )
    tied.weight = model[0].weight
    return model


def test_a_model_is_converted_in_place_and_it_is_said_what_was_left_and_why(cpu_ref, capsys):
    theirs = network()
    ours = copy.deepcopy(theirs)
    parameters = list(ours.parameters())
    done = hal.nn.convert(ours)
    assert all(a is b for a, b in zip(ours.parameters(), parameters)) and ours[7].weight is ours[0].weight
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert {what.split()[0]: count for what, count in done.replaced.items()} == {
        "Embedding": 1,
        "LayerNorm": 1,
        "Linear": 2,
        "GELU": 1,
        "RMSNorm": 1,
    }
    assert done.left == {
        "Tanh: no rule for it": 1,
        "Own: is a subclass of torch.nn.Linear that may define another forward": 1,
    }
    assert str(done) in capsys.readouterr().out
    torch.testing.assert_close(ours(IDS), theirs(IDS))
    # A copy of a converted model is converted, and converting again changes nothing.
    assert isinstance(copy.deepcopy(ours)[2], hal.nn.Linear)
    assert not hal.nn.convert(ours, verbose=False).replaced


def test_convert_activates_the_backend_that_it_is_given(cpu_ref):
    with hal.activated(hal.testing.Reference()):
        hal.nn.convert(network(), backend="cpu_ref", verbose=False)
        assert hal.backend().name == "cpu_ref"


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_norm_adds_its_offset_to_the_weights_and_has_a_form_of_a_sum(kind, cpu_ref):
    theirs, ours = (getattr(module, kind)(8, eps=1e-3) for module in (nn, hal.nn))
    weight = torch.linspace(0.5, 1.5, 8)
    theirs.weight.data, ours.weight.data, ours.offset = weight, weight - 1.0, 1.0
    other = X.flip(0)
    torch.testing.assert_close(ours(X), theirs(X))
    torch.testing.assert_close(ours.of_sum(X, other), (theirs(X + other), X + other))


def test_the_layers_of_the_gpt_are_these(cpu_ref):
    from model_options import LLAMA_OPTIONS

    from hal.model.config.schema import Config
    from hal.model.gpt.model import GPT

    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 8}
    for options in ({}, {**LLAMA_OPTIONS, "untie_embeddings_and_output_weights": True}):
        config = Config(**sizes, **options)
        config.set_vocabulary(64)
        for module in GPT(config, hal.device()).modules():
            if any(True for _ in module.parameters(recurse=False)):
                assert isinstance(module, (hal.nn.Linear, hal.nn.Embedding, hal.nn.LayerNorm, hal.nn.RMSNorm)), module
                weight = module.weight.shape
                assert tuple(weight) in {
                    (getattr(module, "out_features", 0), getattr(module, "in_features", 0)),
                    (getattr(module, "num_embeddings", 0), getattr(module, "embedding_dim", 0)),
                    getattr(module, "normalized_shape", ()),
                }
