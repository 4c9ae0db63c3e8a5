"""Megatron checkpoints load with the logits of megatron-core's model, and it loads HAL's checkpoints, at any layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_models import PADDED, load_ours, save_theirs
from models import GPT2, LLAMA, VOCABULARY, assert_equal_weights, hal_logits, random_weights

from hal import HalError
from hal.model.apps.convert import hal_format, megatron_distributed, megatron_ranks
from hal.model.apps.convert.qkv_layout import (
    group_qkv,
    pairs_to_halves,
    reorder_legacy_qkv,
    ungroup_qkv,
)
from hal.testing.processes import run_processes


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(GPT2, id="gpt2", marks=pytest.mark.nightly),
        pytest.param(LLAMA, id="llama", marks=pytest.mark.slow),
    ],
)
def test_what_megatron_wrote_has_its_logits_here(options: dict[str, Any], tmp_path: Path, cpu_ref: Any) -> None:
    (logits,) = run_processes(1, save_theirs, options, str(tmp_path))
    expected = torch.tensor(logits)[..., :VOCABULARY]
    for name, module in (("legacy", megatron_ranks), ("distributed", megatron_distributed)):
        weights = module.read(tmp_path / name, vocabulary=VOCABULARY)
        assert weights.iteration == 12 and weights.tokenizer == {"tokenizer_type": "NullTokenizer", "vocab_size": 100}
        hal_format.write(weights, tmp_path / f"{name}-here")
        torch.testing.assert_close(hal_logits(tmp_path / f"{name}-here"), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "options, tp, pp",
    [
        pytest.param(GPT2, 1, 1, marks=pytest.mark.slow),
        pytest.param(LLAMA, 1, 1, marks=pytest.mark.nightly),
        pytest.param(LLAMA, 2, 2, marks=pytest.mark.slow),
        pytest.param(GPT2, 2, 1, marks=pytest.mark.nightly),
    ],
)
def test_what_is_written_here_loads_in_megatron_core(
    options: dict[str, Any], tp: int, pp: int, tmp_path: Path, cpu_ref: Any
) -> None:
    weights = random_weights(options)
    hal_format.write(weights, tmp_path / "ours")
    megatron_ranks.write(weights, tmp_path / "legacy", tp=tp, pp=pp, divisible_by=PADDED // tp)
    megatron_distributed.write(weights, tmp_path / "distributed", divisible_by=PADDED)
    for answer, different in run_processes(tp * pp, load_ours, options, str(tmp_path), {"tp": tp, "pp": pp}):
        assert different == []
        if answer is not None:
            expected = torch.tensor(answer)[..., :VOCABULARY]
            torch.testing.assert_close(hal_logits(tmp_path / "ours"), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("options", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_layout_of_files_holds_the_same_model(options: Any, tp: int, pp: int, tmp_path: Path) -> None:
    weights = random_weights({**options, "num_layers": 4})
    folder = megatron_ranks.write(weights, tmp_path, tp=tp, pp=pp, divisible_by=8)
    assert len(list(folder.glob("mp_rank_*/model_optim_rng.pt"))) == tp * pp
    assert_equal_weights(megatron_ranks.read(tmp_path, vocabulary=VOCABULARY), weights)
    # The folder itself can also be given as the path. Without an option about padding, no padding is removed.
    assert megatron_ranks.read(folder).vocabulary == -(-VOCABULARY // (8 * tp)) * 8 * tp


@pytest.mark.parametrize("options", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_a_distributed_checkpoint_holds_the_same_model(options: Any, tmp_path: Path) -> None:
    weights = random_weights(options)
    megatron_distributed.write(weights, tmp_path)
    assert_equal_weights(megatron_distributed.read(tmp_path, vocabulary=VOCABULARY), weights)


@pytest.mark.parametrize(
    "options, named",
    [
        ({**GPT2, "geglu": True}, "--geglu"),
        ({**GPT2, "use_sandwich_norm": True}, "--use-sandwich-norm"),
        ({**GPT2, "pre_tokens": 3}, "--pre-tokens"),
        ({**LLAMA, "qk_layernorm": True, "softmax_scale": 0.5}, "^--softmax-scale of"),
        ({**LLAMA, "rope_type": "yarn", "rotary_scaling_factor": 4.0}, "--rope-type, --rotary-scaling-factor"),
        ({**LLAMA, "rotary_seq_len_interpolation_factor": 2.0}, "--rotary-seq-len-interpolation-factor"),
    ],
)
@pytest.mark.parametrize("write", [megatron_ranks.write, megatron_distributed.write])
def test_a_model_that_the_args_would_not_describe_is_not_written(
    options: Any, named: str, write: Any, tmp_path: Path
) -> None:
    with pytest.raises(HalError, match=named):
        write(random_weights(options), tmp_path)
    assert list(tmp_path.iterdir()) == []


def _as_before_core(weights: Any, version: float, tp: int) -> list[dict[str, Any]]:
    """The ranks' states as Megatron-LM stored them before megatron-core, under the names and orders of `version`."""
    old = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
    old |= {"self_attention.linear_qkv": "attention.query_key_value", "self_attention.linear_proj": "attention.dense"}
    old |= {"mlp.linear_fc1": "mlp.dense_h_to_4h", "mlp.linear_fc2": "mlp.dense_4h_to_h"}
    states = []
    for rank in range(tp):
        embedding: dict[str, Any] = {}
        layers: dict[str, Any] = {}
        for name, whole in weights.tensors.items():
            t = megatron_ranks._share(whole, megatron_ranks.shard_of(name, False), rank, tp)
            if name.startswith("embedding."):
                embedding[name.split(".")[1]] = {"weight": t}
            elif name.startswith("decoder.final"):
                layers[name.removeprefix("decoder.")] = t
            else:
                _, _, number, rest = name.split(".", 3)
                module, part = rest.rsplit(".", 1)
                if "linear_qkv" in name and version < 2:
                    heads = t.reshape(weights.options["num_attention_heads"] // tp, 3, -1, *t.shape[1:])
                    t = heads.transpose(0, 1) if version < 1 else heads.transpose(1, 2)
                    t = t.flatten(0, 2).contiguous()
                layers[f"layers.{number}.{old[module]}.{part}"] = t
        args = __import__("argparse").Namespace(
            num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16, seq_length=16
        )
        args.model_parallel_size, args.padded_vocab_size = tp, weights.vocabulary
        model = {"language_model": {"embedding": embedding, "transformer": layers}}
        states.append(
            {"args": args, "iteration": 5, "model": model, **({"checkpoint_version": version} if version else {})}
        )
    return states


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("tp", [1, 2])
def test_checkpoints_of_before_megatron_core(version: float, tp: int, tmp_path: Path) -> None:
    weights = random_weights(GPT2, vocabulary=104)
    for rank, state in enumerate(_as_before_core(weights, version, tp)):
        (tmp_path / f"mp_rank_{rank:02d}").mkdir()
        # Such files use the older of torch's two file formats.
        path = tmp_path / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        torch.save(state, path, _use_new_zipfile_serialization=version >= 2)
    read = megatron_ranks.read(tmp_path)
    assert read.iteration == 5
    for name, tensor in weights.tensors.items():
        assert torch.equal(read.tensors[name], tensor), name


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_would_run_something_is_not_run(zipped: bool, tmp_path: Path) -> None:
    weights = random_weights(GPT2)
    folder, bomb = megatron_ranks.write(weights, tmp_path), tmp_path / "ran"
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    for place in ("model", "opt_param_scheduler"):
        torch.save({**state, place: _Bomb(bomb)}, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(HalError, match=r"could run code: .*open"):
            megatron_ranks.read(tmp_path)
        assert not bomb.exists()


class _Shell:
    def __reduce__(self) -> Any:
        return (os.system, ("exit 1",))


@pytest.mark.parametrize("zipped", [True, False])
def test_the_refusal_of_a_pickle_names_what_it_wants(zipped: bool, tmp_path: Path, recwarn: Any) -> None:
    path = megatron_ranks.write(random_weights(GPT2), tmp_path) / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    torch.save({**state, "rerun": _Shell()}, path, _use_new_zipfile_serialization=zipped)
    recwarn.clear()
    with pytest.raises(
        HalError, match=rf"could run code: it references non-allowlisted global {os.system.__module__}\.system\. Save"
    ):
        megatron_ranks.read(tmp_path)
    assert not recwarn.list


def test_an_index_that_would_run_something_is_not_run(tmp_path: Path) -> None:
    import pickle

    folder, bomb = megatron_distributed.write(random_weights(GPT2), tmp_path), tmp_path / "ran"
    metadata = folder / ".metadata"
    whole = metadata.read_bytes()
    metadata.write_bytes(pickle.dumps(_Bomb(bomb)))
    with pytest.raises(HalError, match=r"non-allowlisted global _?io\.open"):
        megatron_distributed.read(tmp_path)
    assert not bomb.exists()
    for content in (b"", whole[: len(whole) // 2], b"text", pickle.dumps([1, 2])):
        metadata.write_bytes(content)
        with pytest.raises(HalError, match="is not an index of a distributed checkpoint"):
            megatron_distributed.read(tmp_path)
    index = pickle.loads(whole)
    for info in index.storage_data.values():
        object.__setattr__(info, "relative_path", "../../elsewhere")
    metadata.write_bytes(pickle.dumps(index))
    with pytest.raises(HalError, match="outside its folder"):
        megatron_distributed.read(tmp_path)


def test_incomplete_and_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = megatron_ranks.write(random_weights(GPT2), tmp_path, tp=2, divisible_by=8)
    path = folder / "mp_rank_01" / "model_optim_rng.pt"
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-500], b"\x80\x02."):
        path.write_bytes(content)
        with pytest.raises(HalError, match=r"not a torch\.save file|contains no model"):
            megatron_ranks.read(tmp_path)
    path.unlink()
    with pytest.raises(HalError, match=r"lacks the files of rank mp_rank_01"):
        megatron_ranks.read(tmp_path)
    path.parent.rmdir()
    with pytest.raises(HalError, match="has the files of 1 ranks, but its args have"):
        megatron_ranks.read(tmp_path)
    (folder / "mp_rank_0_0").mkdir()
    with pytest.raises(HalError, match=r"mp_rank_0_0 is not the folder of a rank, mp_rank_TT"):
        megatron_ranks.read(tmp_path)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"num_experts": 8, "moe_latent_size": 16}, "experts of another width"),
        ({"num_experts": 8, "moe_shared_expert_gate": True}, "a gate on the shared expert"),
        ({"qk_layernorm": True}, "missing .*k_layernorm"),
        ({"multi_latent_attention": True}, "missing .*linear_kv_down_proj"),
        ({"softmax_scale": 1.0}, "a custom attention scale"),
        ({"softmax_type": "learnable"}, "softmax of attention is of type 'learnable'"),
        ({"rope_type": "yarn"}, "of type 'yarn'"),
        ({"glu_linear_offset": 1.0}, "an offset in the gated MLP"),
        ({"position_embedding_type": "relative"}, "position_embedding_type: choose one of"),
        ({"norm_epsilon": "small"}, "norm_epsilon: expected float, found 'small'"),
        ({"num_layers": None}, "no valid num_layers"),
        ({"num_layers": "many"}, "no valid num_layers"),
        ({"num_layers": 10**5}, "fewer than 100000 layers"),
        ({"hidden_size": 48}, "shape"),
        ({"swiglu": True}, "shape"),
        ({"normalization": "RMSNorm"}, "are unexpected"),
    ],
)
def test_models_that_are_not_hals_are_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = megatron_ranks.write(random_weights(GPT2), tmp_path) / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    vars(state["args"]).update(change)
    torch.save(state, path)
    with pytest.raises(HalError, match=reason):
        megatron_ranks.read(tmp_path)


def test_megatron_npus_gate_is_the_second_half(tmp_path: Path) -> None:
    """--is-x-model: x * gelu(gates) of the halves of the first layer, whose rows --ffn-hidden-size counts."""
    weights = random_weights({**LLAMA, "swiglu": True})
    for path in (megatron_ranks.write(weights, tmp_path, tp=2, divisible_by=8)).glob("*/model_optim_rng.pt"):
        state = torch.load(path, weights_only=False)
        width = 2 * state["args"].ffn_hidden_size
        vars(state["args"]).update(swiglu=False, is_x_model=True, ffn_hidden_size=width)
        torch.save(state, path)
    read = megatron_ranks.read(tmp_path)
    config, name = read.config(), "decoder.layers.1.mlp.linear_fc1.weight"
    assert (config.geglu, config.swiglu, config.ffn_hidden_size) == (True, False, width // 2)
    value, gate = weights.tensors[name].chunk(2)
    assert torch.equal(read.tensors[name], torch.cat([gate, value]))


def test_layouts_that_do_not_divide_the_model_are_refused(tmp_path: Path) -> None:
    for layout, what in (({"tp": 4}, "query groups"), ({"pp": 3}, "layers")):
        with pytest.raises(HalError, match=what):
            megatron_ranks.write(random_weights(LLAMA), tmp_path, **layout)
    assert list(tmp_path.iterdir()) == []


def test_orders_of_rows() -> None:
    rows = torch.arange(4 * 6 * 5.0).view(24, 5)
    q, k, v = rows, rows[:12] + 1000, rows[:12] + 2000
    mixed = group_qkv(q, k, v, 2)
    # Two groups of [two query heads, key, value], six channels each.
    assert mixed[:, 0].tolist() == [*q[:12, 0], *k[:6, 0], *v[:6, 0], *q[12:, 0], *k[6:, 0], *v[6:, 0]]
    assert all(torch.equal(a, b) for a, b in zip(ungroup_qkv(mixed, 2, 6), (q, k, v)))
    halves = pairs_to_halves(rows, 6)
    assert halves[:6, 0].tolist() == rows[[0, 2, 4, 1, 3, 5], 0].tolist()
    assert reorder_legacy_qkv(torch.arange(12), 2, 2, 0)[:6].tolist() == [0, 1, 4, 5, 8, 9]
    assert reorder_legacy_qkv(torch.arange(12), 2, 2, 1.0)[:6].tolist() == [0, 3, 1, 4, 2, 5]
