"""`hal plan`: text and JSON agree, the device's figures can be replaced, and wrong usage gives a one-line error."""

from __future__ import annotations

import json

import pytest

from hal.cli import main

SMALL = [
    "--num-layers",
    "8",
    "--hidden-size",
    "1024",
    "--num-attention-heads",
    "16",
    "--global-batch-size",
    "64",
    "--bf16",
]


def test_llama_70b_on_a_thousand_devices(capsys, tmp_path) -> None:
    file = tmp_path / "plan.json"
    options = ["--tensor-model-parallel-size", "8", "--micro-batch-size", "1"]
    assert (
        main(["plan", "--config", "llama-70b", "--devices", "1024", "--backend", "cuda", *options, "--json", str(file)])
        == 0
    )
    text, record = capsys.readouterr().out, json.loads(file.read_text())
    assert "68.98 billion parameters" in text and "NVIDIA H100" in text and "do not fit, smallest excess first" in text
    assert record["parameters"] == 68_976_648_192 and record["devices"] == 1024
    for row in record["fits"]:
        assert row["tp"] == 8 and row["tp"] * row["cp"] * row["pp"] * row["dp"] == 1024
        assert row["memory_bytes"]["total"] <= record["limit_bytes"]
        assert 0 < row["estimate"]["mfu"] < 1
    assert f"the first as options of hal train: {record['fits'][0]['options']}" in text
    assert all(row["missing_bytes"] > 0 for row in record["too_large"])


def test_a_mixture_of_experts(capsys) -> None:
    model = [*SMALL, "--disable-bias-linear", "--swiglu", "--num-experts", "8", "--micro-batch-size", "1"]
    argv = ["plan", *model, "--devices", "8", "--backend", "cuda", "--device-memory", "24", "--json", "-"]
    fixed = ["--pipeline-model-parallel-size", "1", "--recompute-granularity", "full"]

    def plan(*options: str) -> tuple[dict, str]:
        assert main([*argv, *fixed, *options]) == 0
        out, err = capsys.readouterr()
        return json.loads(out), err

    record, text = plan()
    # 6 of 8 experts with 3 matrices of 1024 x 2688 channels, in each of 8 layers.
    assert record["parameters"] - record["active_parameters"] == 8 * 6 * 3 * 1024 * 2688
    assert f"of which a token uses {record['active_parameters'] / 1e9:.2f} billion" in text
    assert "8 experts, 2 per token, at most 1.2 x the mean rows per device" in text and "EP  ETP" in text
    assert {(row["ep"], row["etp"]) for row in record["fits"]} >= {(1, 1), (2, 1), (4, 1), (8, 1), (2, 2)}
    for row in record["fits"]:
        assert (row["traffic_bytes_per_step"]["experts"] > 0) == (row["ep"] * row["etp"] > 1)
        assert f"--expert-model-parallel-size {row['ep']}" in row["options"] or row["ep"] == 1
        assert ("--expert-tensor-parallel-size" in row["options"]) == (row["etp"] != row["tp"])
    one = {row["options"]: row["memory_bytes"]["total"] for row in plan("--expert-imbalance", "1")[0]["fits"]}
    two = {row["options"]: row["memory_bytes"]["total"] for row in plan("--expert-imbalance", "2")[0]["fits"]}
    assert all(two[options] >= one[options] for options in two) and any(two[o] > one[o] for o in two)


LATENT = "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"


@pytest.mark.parametrize(
    "options, elements, words",
    [
        (LATENT, 576, "a latent of 512 and a rotated key of 64, alike on every tensor-parallel rank; keys and values "),
        ("--group-query-attention --num-query-groups 4", 2 * 4 * 64, "(keys and values)"),
        ("", 2 * 1024, "(keys and values)"),
    ],
)
def test_the_cache_of_generation(options, elements, words, capsys) -> None:
    more = "--position-embedding-type rope --recompute-granularity full --micro-batch-size 1 --devices 1 --backend cuda"
    assert main(["plan", *SMALL, *options.split(), *more.split(), "--json", "-"]) == 0
    out, text = capsys.readouterr()
    size = {"elements_per_token_and_layer": elements, "bytes_per_token": 8 * elements * 2}
    assert json.loads(out)["generation_cache"] == size
    assert f"generation caches {elements:,} elements per token and layer" in text and words in text
    assert f"{8 * elements * 2 / 1024:,.1f} KiB per token in all layers" in text
    assert ("of all heads would be 5,120)" in text) == (options == LATENT)  # 16 heads of 192 + 128


def test_json_on_the_standard_output_is_nothing_but_json(capsys) -> None:
    assert main(["plan", *SMALL, "--devices", "4", "--backend", "npu", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["accelerator"]["name"] == "910b2" and "layouts fit" in err


def test_nothing_fits(capsys) -> None:
    assert main(["plan", *SMALL, "--devices", "2", "--backend", "cuda", "--device-memory", "0.5"]) == 1
    out = capsys.readouterr().out
    assert "0 layouts fit" in out and "GiB too much" in out and "changed: --device-memory" in out


def test_figures_of_the_device_can_be_given(capsys) -> None:
    def mfu(*options: str) -> float:
        assert main(["plan", *SMALL, "--devices", "8", "--backend", "cuda", "--json", "-", *options]) == 0
        return json.loads(capsys.readouterr().out)["fits"][0]["estimate"]["mfu"]

    assert mfu("--device-flops", "100") > mfu() > mfu("--memory-bandwidth", "300")


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--devices", "8"], "no backend was chosen"),
        (["--devices", "0", "--backend", "cuda"], "--devices must be 1 or more"),
        (["--devices", "8", "--backend", "cuda", "--headroom", "1.5"], "--headroom is a fraction"),
        (["--devices", "8", "--backend", "cuda", "--accelerator", "tpu"], "it knows: h100, h200, a100, a100-40gb"),
        (["--devices", "8", "--backend", "cuda", "--network", "-1"], "--network must be above 0"),
        (["--devices", "8", "--backend", "cuda", "--device-memory", "0"], "--device-memory must be above 0"),
        (
            ["--devices", "8", "--backend", "cuda", "--device-memory", "nan"],
            "--device-memory must be above 0 and finite",
        ),
        (["--devices", "8", "--backend", "cuda", "--device-flops", "inf"], "--device-flops must be above 0 and finite"),
        (["--devices", "8", "--backend", "cuda", "--devices-per-node", "0"], "--devices-per-node must be above 0"),
        (["--devices", "8", "--backend", "cuda", "--expert-imbalance", "2"], "no effect without --num-experts"),
        (["--devices", "8", "--backend", "cuda", "--top", "0"], "--top must be 1 or more"),
        (["--devices", "8", "--backend", "cuda", "--simulate"], "--simulate has no effect"),
        (["--devices", "8", "--backend", "cuda", "--hiden-size", "8"], "Did you mean --hidden-size?"),
        (["--devices", "8", "--backend", "npu"], "the fp32 peak of 910b2 is unknown"),
        (["--devices", "7", "--backend", "cuda", "--config", "llama-70b"], "no layout of this model on 7 devices"),
        (["--devices", "8", "--backend", "nobody"], "nobody"),
    ],
)
def test_wrong_usage_is_one_line(capsys, monkeypatch, argv, words) -> None:
    monkeypatch.delenv("HAL_BACKEND", raising=False)
    try:
        code = main(["plan", *argv])
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and words in error and error.count("\n") == 1
