"""What applies to all front ends: tables without duplicate keys, `hal config show`, and ready configurations."""

import re
from pathlib import Path

import pytest
import yaml

from hal.cli import main
from hal.model.config.command_line import parse, read_config
from hal.model.config.formats import deepspeed, mindformers, mindspeed
from hal.model.config.schema import READY, ConfigError
from hal.model.gpt.model import GPT


@pytest.mark.parametrize("front", [mindspeed, mindformers, deepspeed])
def test_no_key_of_a_table_is_there_twice(front):
    """YAML itself would silently keep the last rule."""
    table = Path(front.__file__).with_suffix(".yaml").read_text()
    assert len(re.findall(r"^[\w.-]+:", table, re.MULTILINE)) == len(front.rules())


def test_show_prints_every_value_with_its_origin_and_reads_back(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HAL_SEED", "77")
    path = tmp_path / "m.yaml"
    path.write_text(yaml.safe_dump({"model_config": {"hidden_size": 64, "normalization": "RMSNorm"}}))
    argv = ["--config", str(path), "--lr", "1e-4", "--pin", "linear=cpu_ref/c", "--data-path", "0.5", "a", "0.5", "b c"]
    assert main(["config", "show", *argv]) == 0
    out = capsys.readouterr().out
    lines = {line.lstrip("# ").split(":")[0]: line for line in out.splitlines() if ":" in line}
    assert lines["hidden-size"].endswith(f"# --config {path}: model_config.hidden_size")
    assert lines["lr"].endswith("# command line") and lines["seed"].endswith("# HAL_SEED")
    assert lines["num-layers"].startswith("# ") and lines["num-layers"].endswith("# default")
    assert lines["kv-channels"].endswith("# derived")
    (tmp_path / "again.yaml").write_text(out)
    again, first = parse(["--config", str(tmp_path / "again.yaml")], {}), parse(argv)
    assert again == first and again.data_path == ("0.5", "a", "0.5", "b c")


def test_tabs_of_json_are_blanks_and_sections_that_change_results_are_refused_by_name(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{\n\t"train_batch_size": 8,\n\t"compression_training": {"layer_reduction": {"enabled": true}}\n}')
    with pytest.raises(ConfigError, match="compression_training: dict cannot be followed: weights are not pruned"):
        parse(["--deepspeed-config", str(path)], {})


@pytest.mark.parametrize("name", sorted(p.stem for p in READY.glob("*.yaml")))
def test_show_needs_no_data_and_says_what_a_run_would(name, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["config", "show", "--config", name]) == 0
    out = capsys.readouterr().out
    needed = out.partition("\n# still to be given\n")[2]
    assert ("give --data-path" in needed) == (not name.startswith("tiny"))
    assert ("processes: at least 32" in needed) == (name == "mindformers-38b")
    if not name.startswith("tiny"):
        with pytest.raises(ConfigError, match="give --data-path"):
            parse(["--config", name], {})
    # Errors are reported nevertheless.
    assert main(["config", "show", "--config", name, "--split", "1"]) == 2
    # With the requested option, the printed text is a valid configuration.
    (tmp_path / "shown.yaml").write_text(out)
    if name == "mindformers-38b":
        monkeypatch.setenv("WORLD_SIZE", "32")
    data = [] if name.startswith("tiny") else ["--data-path", "x"]
    assert main(["config", "show", "--config", str(tmp_path / "shown.yaml"), *data]) == 0
    assert "still to be given" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, code", [([], 2), (["--help"], 0), (["print"], 2), (["show", "--config", "absent.yaml"], 2)]
)
def test_wrong_usage_of_show(argv, code, capsys):
    assert main(["config", *argv]) == code


@pytest.mark.parametrize("path", sorted(READY.glob("*.yaml")), ids=lambda p: p.stem)
def test_ready_configurations_are_whole(path, monkeypatch):
    cards = {"mindformers-38b": "32"}.get(path.stem)
    if cards:
        monkeypatch.setenv("WORLD_SIZE", cards)
    data_path = [] if path.stem.startswith("tiny") else ["--data-path", "x"]
    config = parse(["--config", path.stem, *data_path], {})
    assert config.train_iters and not read_config(path.stem).values.keys() - config.given - {
        "ddp_bucket_size",
        "use_distributed_optimizer",
    }


def test_the_command_lines_tokenizer_replaces_that_of_a_file():
    config = parse(
        ["--config", "llama-7b", "--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "m", "--data-path", "x"],
        {},
    )
    assert config.tokenizer_model == "m" and config.vocab_size is None


def test_new_options_do_what_they_say(references):
    config = parse(["--embedding-init-method-std", "0.5", "--pad-vocab-size-to", "512", "--seq-length", "8"], {})
    config.set_vocabulary(257)
    import torch

    model = GPT(config, torch.device("cpu"))
    assert model.embedding.word_embeddings.weight.shape[0] == 512
    assert model.embedding.word_embeddings.weight.std().item() == pytest.approx(0.5, rel=0.05)
    with pytest.raises(ConfigError, match="less than the vocabulary size 600"):
        config.set_vocabulary(600)
    assert parse(["--lr-warmup-fraction", "0.1", "--lr-decay-iters", "50"], {}).lr_warmup_iters == 5
    assert parse(["--warmup", ".01"], {}).lr_warmup_iters == 1
    with pytest.raises(ConfigError, match="contradict"):
        parse(["--warmup", ".01", "--lr-warmup-iters", "4"], {})
