"""Models of transformers train and generate on HAL as they do in eager mode, with and without padding."""

from __future__ import annotations

import copy

import pytest
import torch

import hal
from hal import ops

transformers = pytest.importorskip("transformers", reason="needs transformers (extra: transformers)")

import tiny_models  # noqa: E402

from hal.core.dispatch import wrapped_calls  # noqa: E402
from hal.integrations.transformers import convert  # noqa: E402


def compare(family: str, padded: bool, **options: str) -> None:
    """20 steps and, from the weights after them, 15 greedy tokens. The eager model runs on the CPU."""
    eager = tiny_models.model(family, **options)
    ours = copy.deepcopy(eager)
    convert(ours, verbose=False)
    inputs = tiny_models.batch(padded)
    expected, losses = tiny_models.train(eager, inputs), tiny_models.train(ours, inputs)
    assert expected[-1] < expected[0] - 0.05
    assert losses == pytest.approx(expected, abs=3e-5)
    if family != "bert":
        assert tiny_models.generate(ours, inputs) == tiny_models.generate(eager, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_two_families_train_and_generate_as_eager_with_padding(family, cpu_ref):
    compare(family, padded=True)


@pytest.mark.nightly
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_family_trains_and_generates_as_eager(family, padded, cpu_ref):
    compare(family, padded)


@pytest.mark.nightly
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma", "mixtral", "bert"])
def test_every_family_trains_and_generates_as_eager_on_the_simulated_npu(family, padded, simulated_npu):
    if simulated_npu is None:
        pytest.skip("torch_npu is not installed (pip install 'torch-hal[npu]')")
    # transformers' other implementations of experts call torch.histc, which the simulator does not have.
    experts = {"experts_implementation": "eager"} if family == "mixtral" else {}
    with hal.activated(simulated_npu):
        compare(family, padded, **experts)


def called(model, **inputs):
    """The ops that a forward pass of a model calls, with how often."""
    counts: dict[str, int] = {}

    def counting(impl, call):
        def counted(*args, **kwargs):
            counts[impl.op.name] = counts.get(impl.op.name, 0) + 1
            return call(*args, **kwargs)

        return counted

    with wrapped_calls(counting), torch.no_grad():
        model(**inputs)
    return counts


def test_what_is_said_to_be_replaced_runs_on_hal(cpu_ref, capsys):
    model = tiny_models.model("llama")
    done = convert(model)
    assert str(done) in capsys.readouterr().out
    counts = called(model, input_ids=torch.arange(8)[None])
    assert counts == {"embedding": 1, "rms_norm": 5, "linear": 15, "rotary": 4, "swiglu": 2, "flash_attention": 2}
    assert sum(done.replaced.values()) == 1 + 5 + 15 + 2 + 2 + 1
    # Converting again changes nothing.
    assert convert(model, verbose=False).replaced == {"attention implementation by hal.ops.flash_attention": 1}


def test_many_rows_take_one_product_for_gate_and_up_unless_a_hook_needs_both_calls(cpu_ref):
    model = tiny_models.model("llama")
    expected = copy.deepcopy(model)
    convert(model, verbose=False)
    x, other = (torch.randn(2, 40, 32, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(2))
    mlp, eager = model.model.layers[0].mlp, expected.model.layers[0].mlp
    mlp(x).square().sum().backward()
    eager(other).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    for ours, theirs in zip(mlp.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert linears(mlp, x) == 2
    assert linears(mlp, x[:, :4]) == 3
    for register in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
        calls = []
        hook = getattr(mlp.up_proj, f"register_{register}")(lambda *_, calls=calls: calls.append("up"))
        assert linears(mlp, x) == 3
        mlp(x).sum().backward()
        assert calls == ["up"] * (1 if "backward" in register else 2), register
        hook.remove()


def linears(module, x):
    """How often a forward pass calls ops.linear."""
    return called(module, x=x)["linear"]


def test_a_class_that_computes_something_else_is_left_with_the_reason(cpu_ref):
    from transformers.models.llama import modeling_llama

    class LlamaRMSNorm(modeling_llama.LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) * 1.01

    model = tiny_models.model("llama")
    model.model.norm = LlamaRMSNorm(32)
    done = convert(model, verbose=False)
    (left,) = [what for what in done.left if "RMSNorm" in what]
    assert "does not compute ops.rms_norm" in left
    assert type(model.model.norm) is LlamaRMSNorm


def test_dropout_is_hals_and_follows_torchs_seed(cpu_ref):
    model = tiny_models.model("llama", attention_dropout=0.5)
    convert(model, verbose=False)
    ids = torch.arange(3, 13)[None]

    def logits(seed):
        torch.manual_seed(seed)
        return model.train()(input_ids=ids).logits.detach()

    assert torch.equal(logits(1), logits(1)) and not torch.equal(logits(1), logits(2))
    model.gradient_checkpointing_enable()
    torch.manual_seed(1)
    model(input_ids=ids, labels=ids).loss.backward()
    again = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_disable()
    torch.manual_seed(1)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), again)), "recomputation drew the same mask"


def test_packed_sequences_attend_within_themselves_and_make_no_square_mask(cpu_ref, monkeypatch):
    model = tiny_models.model("mixtral")
    convert(model, verbose=False)
    ids = torch.arange(3, 23)[None]
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    layouts = []
    original = ops.flash_attention

    def record(*args, **kwargs):
        layouts.append((kwargs["layout"], kwargs.get("mask")))
        return original(*args, **kwargs)

    monkeypatch.setattr(ops, "flash_attention", record)
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
        apart = [model(input_ids=part, use_cache=False).logits[0] for part in (ids[:, :12], ids[:, 12:])]
    assert layouts[:2] == [("TND", None)] * 2
    torch.testing.assert_close(packed, torch.cat(apart))


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_cu_seqlens_of_transformers_collator_are_used(family, cpu_ref):
    model = tiny_models.model(family)
    convert(model, verbose=False)
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    texts = [list(range(3, 15)), list(range(20, 28))]
    inputs = collate([{"input_ids": ids} for ids in texts])
    inputs = {k: v for k, v in inputs.items() if k != "labels"}
    with torch.no_grad():
        packed = model(**inputs, use_cache=False).logits[0]
        apart = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids in texts]
    torch.testing.assert_close(packed, torch.cat(apart))


def test_a_static_cache_gives_the_same_text(cpu_ref):
    model = tiny_models.model("mixtral")
    convert(model, verbose=False)
    inputs = tiny_models.batch(padded=True)
    expected = tiny_models.generate(model, inputs)
    model.generation_config.cache_implementation = "static"
    model.generation_config.disable_compile = True
    assert tiny_models.generate(model, inputs) == expected


def test_a_window_that_the_model_keeps_to_itself_is_refused(cpu_ref):
    from hal.integrations.transformers import attention

    module = torch.nn.Identity()
    module.config = transformers.MixtralConfig(sliding_window=4)
    q = torch.randn(1, 2, 6, 8)
    with pytest.raises(hal.HalError, match=r"does not pass sliding_window.*window of 4.*eager"):
        attention(module, q, q, q, None)
    attention(module, q, q, q, None, sliding_window=None)
    attention(module, q[:, :, :4], q[:, :, :4], q[:, :, :4], None)  # the window hides nothing


@pytest.mark.parametrize("added", [False, True], ids=["bool", "added"])
def test_a_users_own_mask_replaces_causality(added, cpu_ref):
    eager = tiny_models.model("llama")
    ours = copy.deepcopy(eager)
    convert(ours, verbose=False)
    visible = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(3)) < 0.5
    visible |= torch.eye(8, dtype=torch.bool)
    floats = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        expected = eager(input_ids=ids, attention_mask=floats).logits
        result = ours(input_ids=ids, attention_mask=floats if added else visible).logits
    torch.testing.assert_close(result, expected)


@pytest.mark.slow
def test_trainer_trains_as_eager(cpu_ref, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate (extra: transformers)")
    rows = tiny_models.batch(padded=True)
    data = [{name: t[i % 2] for name, t in rows.items()} for i in range(8)]

    def losses(model):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=6,
            per_device_train_batch_size=2,
            logging_steps=1,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            optim="sgd",
            use_cpu=True,
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    eager = tiny_models.model("llama")
    ours = copy.deepcopy(eager)
    convert(ours, verbose=False)
    expected = losses(eager)
    assert len(expected) == 6 and losses(ours) == pytest.approx(expected, abs=1e-5)
