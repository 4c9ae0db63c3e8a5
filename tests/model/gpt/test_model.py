"""The GPT against an independent model in plain torch, and the equalities that its options guarantee."""

import math

import pytest
import torch
import torch.nn.functional as F
from model_options import LLAMA_OPTIONS

import hal
from hal import ops
from hal.model.config.command_line import build
from hal.model.config.schema import Config
from hal.model.gpt.dropout_rng import DropoutRng
from hal.model.gpt.model import GPT

GPT2 = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "seq_length": 24}
LLAMA = {**GPT2, **LLAMA_OPTIONS, "num_query_groups": 2}
CAPPED = {"pre_tokens": 5, "window_attn_skip_freq": "2", "attn_logit_softcapping": 0.3, "softmax_scale": 0.4}


def model(**options):
    config = build({"tokenizer_type": "NullTokenizer", "vocab_size": 100, "data_path": "unused", **options})
    return GPT(config, torch.device("cpu"))


def batch(size=3, length=24, seed=0):
    ids = torch.randint(0, 100, (size, length + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def perturbed(gpt):
    """Adds noise to norms and biases, whose initial 1 and 0 can hide errors, and multiplies the weights by 4."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in gpt.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=draw) * 0.1)
            else:
                parameter.mul_(4.0)
    return gpt


def plain_gpt2(p, tokens, heads, activation=lambda y: F.gelu(y, approximate="tanh")):
    b, s = tokens.shape
    x = p["embedding.word_embeddings.weight"][tokens] + p["embedding.position_embeddings.weight"][:s]
    h = x.shape[-1]
    for n in range(2):
        at = f"decoder.layers.{n}."

        def norm(y, name, at=at):
            return F.layer_norm(y, (h,), p[at + name + ".weight"], p[at + name + ".bias"], 1e-5)

        def linear(y, name, at=at):
            return y @ p[at + name + ".weight"].T + p[at + name + ".bias"]

        mixed = linear(norm(x, "input_layernorm"), "self_attention.linear_qkv").view(b, s, heads, 3, h // heads)
        q, k, v = (mixed[..., i, :].transpose(1, 2) for i in range(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, h)
        x = x + linear(y, "self_attention.linear_proj")
        y = activation(linear(norm(x, "pre_mlp_layernorm"), "mlp.linear_fc1"))
        x = x + linear(y, "mlp.linear_fc2")
    x = F.layer_norm(x, (h,), p["decoder.final_layernorm.weight"], p["decoder.final_layernorm.bias"], 1e-5)
    return x @ p["embedding.word_embeddings.weight"].T


def llama3_frequency(f):
    """As in Hugging Face's modeling_rope_utils.py: by wavelength, with factor 8, 1, 4 and 8192."""
    wavelength = 2 * math.pi / f
    if wavelength < 8192 / 4:
        return f
    if wavelength > 8192:
        return f / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * f / 8 + smooth * f


def plain_llama(p, tokens, heads, groups, norms=False, scale=lambda f: f, base=10000.0):
    b, s = tokens.shape
    x = p["embedding.word_embeddings.weight"][tokens]
    h = x.shape[-1]
    d = h // heads

    def norm(y, weight):
        return y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    frequency = torch.tensor([scale(base ** (-2 * i / d)) for i in range(d // 2)], dtype=torch.float64)
    rotary_cos_sin = torch.polar(torch.ones(s, d // 2, dtype=torch.float64), torch.arange(s)[:, None] * frequency)

    def rotate(y):  # [b, s, n, d] as complex numbers, channel i with i + d/2
        z = torch.complex(y[..., : d // 2].double(), y[..., d // 2 :].double()) * rotary_cos_sin[:, None]
        return torch.cat((z.real, z.imag), -1).float()

    for n in range(2):
        w = {name.removeprefix(f"decoder.layers.{n}."): weight for name, weight in p.items()}
        rows = w["self_attention.linear_qkv.weight"].view(groups, (heads // groups + 2) * d, h)
        wq, wk, wv = rows.split((heads // groups * d, d, d), dim=1)
        y = norm(x, w["input_layernorm.weight"])
        q, k, v = (torch.einsum("bsh,goh->bsgo", y, part).reshape(b, s, -1, d) for part in (wq, wk, wv))
        if norms:
            q, k = norm(q, w["self_attention.q_layernorm.weight"]), norm(k, w["self_attention.k_layernorm.weight"])
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(heads // groups, dim=2) for t in (k, v))
        scores = torch.einsum("bind,bjnd->bnij", q, k) / math.sqrt(d)
        scores = scores + torch.full((s, s), -math.inf).triu(1)
        y = torch.einsum("bnij,bjnd->bind", scores.softmax(-1), v).reshape(b, s, h)
        x = x + y @ w["self_attention.linear_proj.weight"].T
        gate, up = (norm(x, w["pre_mlp_layernorm.weight"]) @ w["mlp.linear_fc1.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * up) @ w["mlp.linear_fc2.weight"].T
    return norm(x, p["decoder.final_layernorm.weight"]) @ p["output_layer.weight"].T


@pytest.mark.parametrize("backend", ["references", "cpu_ref"])
@pytest.mark.parametrize(
    "options, plain",
    [
        (GPT2, lambda p, t: plain_gpt2(p, t, 4)),
        ({**GPT2, "squared_relu": True}, lambda p, t: plain_gpt2(p, t, 4, lambda y: F.relu(y) ** 2)),
        (LLAMA, lambda p, t: plain_llama(p, t, 4, 2)),
        ({**LLAMA, "qk_layernorm": True}, lambda p, t: plain_llama(p, t, 4, 2, norms=True)),
        (
            # With this base the three ranges of frequencies occur within six channels.
            {**LLAMA, "use_rope_scaling": True, "rotary_base": 1e8},
            lambda p, t: plain_llama(p, t, 4, 2, scale=llama3_frequency, base=1e8),
        ),
    ],
    ids=["gpt2", "squared-relu", "llama", "qk-norms", "llama3-rope"],
)
def test_equals_an_independent_model_with_gradients(request, backend, options, plain):
    request.getfixturevalue(backend)
    gpt = perturbed(model(**options))
    tokens, labels = batch()
    logits = gpt(tokens)
    gpt.loss(logits, labels).backward()
    copies = {name: p.detach().clone().requires_grad_() for name, p in gpt.named_parameters()}
    expected = plain(copies, tokens)
    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    torch.testing.assert_close(logits.transpose(0, 1), expected, rtol=1e-5, atol=2e-5)
    for name, parameter in gpt.named_parameters():
        torch.testing.assert_close(parameter.grad, copies[name].grad, rtol=1e-4, atol=1e-5, msg=name)


def run(seed=5, **options):
    """(loss, gradients by name) of one microbatch with dropout."""
    gpt = perturbed(model(**options))
    tokens, labels = batch()
    loss = gpt.loss(gpt(tokens, DropoutRng(hal.Rng(seed), 0, 3)), labels)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in gpt.named_parameters()}


def assert_same(a, b, exact):
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(a[0], b[0], **tolerance)
    assert a[1].keys() == b[1].keys()
    for name in a[1]:
        torch.testing.assert_close(a[1][name], b[1][name], **({} if not exact else tolerance), msg=name)


@pytest.mark.parametrize("window", [{}, {"pre_tokens": 5}, {"pre_tokens": 9, "next_tokens": -2}, CAPPED])
@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_both_attention_paths_agree_with_windows_and_dropout(cpu_ref, shape, window):
    assert_same(run(**shape, **window), run(**shape, **window, use_flash_attn=False), exact=False)


def test_a_window_may_be_that_of_some_layers(cpu_ref):
    windows = {"pre_tokens": 5, "window_attn_skip_freq": "2"}
    gpt = model(**GPT2, **windows)
    assert [layer.self_attention.core_attention.window for layer in gpt.decoder.layers.values()] == [(5, 0), (None, 0)]
    assert run(**GPT2, **windows)[0] == run(**GPT2, pre_tokens=5, window_attn_skip_freq="[1,0]")[0]
    assert len({run(**GPT2, pre_tokens=5, window_attn_skip_freq=f)[0].item() for f in ("[1,0]", "[0,1]", "[1]*2")}) == 3


def test_norms_that_are_centred_at_zero_compute_the_same(cpu_ref):
    gpt, centred = model(**LLAMA), model(**LLAMA, apply_layernorm_1p=True)
    assert not centred.decoder.final_layernorm.weight.any()
    tokens, _ = batch()
    torch.testing.assert_close(centred(tokens), gpt(tokens), rtol=0, atol=0)
    # In bfloat16 a weight may be smaller than the distance between 1 and the next number.
    norm = model(**LLAMA, apply_layernorm_1p=True, bf16=True).decoder.final_layernorm
    torch.nn.init.constant_(norm.weight, 2.0**-9)
    x = torch.full((1, 1, 48), 1.0, dtype=torch.bfloat16)
    x[..., ::2] = 3.0
    exact = ops.rms_norm(x, torch.full((48,), 1.0 + 2.0**-9), norm.eps)
    assert torch.equal(norm(x), exact)


def test_a_window_changes_the_loss(cpu_ref):
    assert run(**GPT2)[0] != run(**GPT2, pre_tokens=5)[0]


@pytest.mark.parametrize("layout", ["BSH", "SBND", "BSND", "BNSD"])
def test_the_layout_given_to_attention_changes_nothing(cpu_ref, layout):
    assert_same(run(**LLAMA), run(**LLAMA, shape_order=layout), exact=False)


@pytest.mark.parametrize(
    "how",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
        {"recompute_layer_list": ("1",)},
        {"select_recompute_layer_list": ("1",)},
        {"recompute_layer_list": ("1",), "select_recompute_layer_list": ("1",)},
    ],
)
def test_recomputation_is_bit_equal_with_dropout_and_happens(cpu_ref, monkeypatch, how):
    plain, calls = run(**GPT2), []
    attention = ops.flash_attention
    monkeypatch.setattr(ops, "flash_attention", lambda *a, **k: calls.append(1) or attention(*a, **k))
    assert_same(plain, run(**GPT2, **how), exact=True)
    some = how.get("recompute_method") == "block" or len([n for n in how if n.endswith("list")]) == 1
    assert len(calls) == (3 if some else 4)


def test_a_microbatch_draws_its_block_of_the_global_batch(references):
    gpt = model(**GPT2, hidden_dropout=0.3)
    tokens, _ = batch(4)
    dropout_rng = DropoutRng(hal.Rng(3), 0, 4)
    whole = gpt(tokens, dropout_rng)
    parts = [gpt(tokens[i : i + 2], DropoutRng(hal.Rng(3), i, 4)) for i in (0, 2)]
    torch.testing.assert_close(whole, torch.cat(parts, dim=1), rtol=1e-5, atol=1e-6)
    other = gpt(tokens, DropoutRng(hal.Rng(4), 0, 4))
    assert not torch.allclose(whole, other)


@pytest.mark.parametrize("shape", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_the_model_is_causal(references, shape):
    gpt = perturbed(model(**shape))
    tokens, _ = batch()
    changed = tokens.clone()
    changed[:, 15] = (changed[:, 15] + 1) % 100
    before, after = gpt(tokens), gpt(changed)
    assert torch.equal(before[:15], after[:15])
    assert not torch.allclose(before[15:], after[15:])


def test_initialisation_is_megatrons_and_named_as_there(references):
    gpt = model(**{**LLAMA, "hidden_size": 256, "num_layers": 8})
    p = dict(gpt.named_parameters())
    assert p["decoder.layers.3.self_attention.linear_qkv.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert p["decoder.layers.3.mlp.linear_fc2.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert torch.all(p["decoder.final_layernorm.weight"] == 1)
    assert set(p) == {
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
        *(
            f"decoder.layers.{n}.{part}.weight"
            for n in range(8)
            for part in (
                "input_layernorm",
                "self_attention.linear_qkv",
                "self_attention.linear_proj",
                "pre_mlp_layernorm",
                "mlp.linear_fc1",
                "mlp.linear_fc2",
            )
        ),
    }


def test_a_float32_residual_stream_rounds_no_sums(references):
    exact, narrow, wide = (
        model(**{**LLAMA, "num_layers": 12, **how})
        for how in ({}, {"bf16": True}, {"bf16": True, "fp32_residual_connection": True})
    )
    dtypes = []
    for module in (wide.decoder.layers["1"], wide.decoder.layers["1"].mlp, wide.decoder.final_layernorm):
        module.register_forward_pre_hook(lambda module, inputs: dtypes.append(inputs[0].dtype))
    tokens, _ = batch()
    logits = [gpt(tokens).detach() for gpt in (exact, narrow, wide)]
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32] and logits[2].dtype == torch.bfloat16
    # Rounding the sums dominates the error of a deep model: without it, less than half is left.
    errors = [(y.float() - logits[0]).norm() for y in logits[1:]]
    assert errors[1] < errors[0] / 2, errors


def test_a_stage_holds_the_weights_the_whole_model_has(references):
    whole = dict(model(**GPT2).named_parameters())
    config = build({"tokenizer_type": "NullTokenizer", "vocab_size": 100, "data_path": "unused", **GPT2})
    first = GPT(config, torch.device("cpu"), layers=[0], last=False)
    last = GPT(config, torch.device("cpu"), layers=[1], first=False)
    weights = {**dict(first.named_parameters()), **dict(last.named_parameters())}
    copy = weights.pop("output_layer.weight")
    assert torch.equal(copy, whole["embedding.word_embeddings.weight"])
    assert weights.keys() == whole.keys() and all(torch.equal(weights[n], whole[n]) for n in weights)
    tokens, _ = batch()
    torch.testing.assert_close(last(first(tokens)), model(**GPT2)(tokens), rtol=0, atol=0)


def test_options_of_the_layers(references):
    sandwich = model(**GPT2, use_sandwich_norm=True, attn_post_norm_scale=0.0447, ffn_post_norm_scale=0.0825)
    p = dict(sandwich.named_parameters())
    assert torch.all(p["decoder.layers.1.post_attn_norm.weight"] == 0.0447)
    assert torch.all(p["decoder.layers.0.post_mlp_layernorm.weight"] == 0.0825)
    biased = dict(model(**LLAMA, add_qkv_bias=True).named_parameters())
    assert [n for n in biased if n.endswith(".bias")] == [
        f"decoder.layers.{n}.self_attention.linear_qkv.bias" for n in (0, 1)
    ]
    for part, names in (("dense", ["self_attention.linear_proj"]), ("mlp", ["mlp.linear_fc1", "mlp.linear_fc2"])):
        biased = dict(model(**LLAMA, **{f"add_{part}_bias": True}).named_parameters())
        assert [n for n in biased if n.endswith(".bias")] == [
            f"decoder.layers.{n}.{name}.bias" for n in (0, 1) for name in names
        ]
    losses = set()
    for options in (
        {},
        {"gelu_approximate": "none"},
        {"gelu_approximate": "fast"},
        {"geglu": True},
        {"swiglu": True},
        {"use_sandwich_norm": True},
        {"position_embedding_type": "none"},
        {"position_embedding_type": "rope"},
        {"position_embedding_type": "rope", "rotary_interleaved": True},
        {"position_embedding_type": "rope", "rotary_percent": 0.5},
        {"position_embedding_type": "rope", "rotary_base": 50.0},
        {"normalization": "RMSNorm"},
        {"position_embedding_type": "rope", "no_rope_freq": "2"},
        {"kv_channels": 8},
        {"softmax_scale": 0.5},
        {"attn_logit_softcapping": 0.1},
        {"output_logit_softcapping": 0.3},
        {"embedding_multiplier_scale": 3.0},
        {"residual_multiplier": 0.5},
        {"output_multiplier_scale": 0.5},
    ):
        gpt = perturbed(model(**GPT2, **options))
        tokens, labels = batch()
        losses.add(gpt.loss(gpt(tokens), labels).item())
    assert len(losses) == 20  # every option reaches the computation


@pytest.mark.parametrize("fused", [False, True])
def test_ids_that_pad_the_vocabulary_are_left_out_of_the_loss_if_asked(references, fused):
    """A model with zeros as padding has then the loss and the gradients of the model without padding."""
    options = {"num_layers": 1, "hidden_size": 32, "seq_length": 8, "init_method_std": 0.5, "vocab_size": 101}
    tokens, labels = torch.randint(0, 101, (2, 2, 8), generator=torch.Generator().manual_seed(0))

    def loss(**more):
        model = GPT(Config(**options, **more), torch.device("cpu"))
        if more["make_vocab_size_divisible_by"] > 1:
            padding = 128 - 101
            weights = exact.state_dict()
            table = weights["embedding.word_embeddings.weight"]
            weights["embedding.word_embeddings.weight"] = torch.nn.functional.pad(table, (0, 0, 0, padding))
            model.load_state_dict(weights)
        value = model.loss(model(tokens, logits=not fused), labels, hidden=fused)
        value.backward()
        return model, value.item()

    exact, right = loss(make_vocab_size_divisible_by=1)
    _, counted = loss(make_vocab_size_divisible_by=128)
    padded, masked = loss(make_vocab_size_divisible_by=128, mask_padded_vocab=True)
    assert masked == pytest.approx(right, rel=1e-6) and counted > right + 1e-3
    gradient, expected = (m.embedding.word_embeddings.weight.grad for m in (padded, exact))
    torch.testing.assert_close(gradient[:101], expected)
    assert not gradient[101:].any()
