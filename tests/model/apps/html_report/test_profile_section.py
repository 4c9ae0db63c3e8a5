"""What the report shows of a profile, and of runs with different tokenizers; files are not trusted."""

import json
import math

import pytest
from test_report_page import RECORD, written

from hal.model.apps.html_report.page import build_page
from hal.model.apps.html_report.profile import read_profiles
from hal.model.apps.html_report.record import read_runs
from hal.model.config.schema import ConfigError

MS = 1_000_000
OP = {
    "op": "linear",
    "implementation": "x/<fast>",
    "direction": "forward",
    "calls": 2,
    "seconds": 0.004,
    "flops": 8e6,
    "bytes": 4e6,
    "refused": {"x/first": "dtype <float64>"},
    "bound": "products",
    "roofline": 0.625,
}


def profile(rank=0, **change):
    begin = 1000 * MS + 5 * MS * rank
    return {
        "rank": rank,
        "world": 2,
        "asynchronous": False,
        "waits_for_device": False,
        "steps": [[3, 1000 * MS, 1010 * MS]],
        "ops": [OP],
        "ceilings": {"copy": 2e9, "products": {"float32": 3.2e9}},
        "mfu": 0.375,
        "seconds": 0.01,
        "op_seconds": 0.008,
        "blocked_seconds": 0.006 - 0.005 * rank,
        "phases": {"forward": 0.003},
        "spans": [["phase", "forward", begin, begin + 3 * MS], ["communication", "all_reduce", begin, begin + MS]],
        "collectives": [["world", 0, "all_reduce", 64, begin, begin, 1006 * MS]],
        "memory": None,
        **change,
    }


def profiled(folder, *records, **run):
    place = written(folder, "one", **run)
    (place / "profile").mkdir()
    for record in records:
        (place / "profile" / f"rank-{record['rank']}.json").write_text(json.dumps(record))
    (place / "profile" / "rank-0.trace.json").write_text("not a profile")
    return place


def test_ops_timeline_and_waiting_are_shown(tmp_path):
    (run,) = read_runs([profiled(tmp_path, profile(0), profile(1))])
    first, second = run.profiles
    assert (first.waited, second.waited) == (pytest.approx(0.005), 0)
    page = build_page([run])
    assert "x/&lt;fast&gt;" in page and "x/first: dtype &lt;float64&gt;" in page and "<float64>" not in page
    for text in ("62%", "37.5%", "50.0%", "rank 1", "Timeline of the ranks"):
        assert text in page, text


def test_memory_stands_beside_the_plan(tmp_path):
    memory = {
        "times": [0.0, 0.001],
        "bytes": {"weights": [2**20] * 2, "activations and temporary": [0, 2**20]},
        "peak": {"weights": 2**20, "activations and temporary": 2**20},
    }
    config = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "global_batch_size": 4, "seq_length": 16}
    record = profile(memory=memory, world=1)
    (run,) = read_runs([profiled(tmp_path, record, config={**config, "padded_vocab_size": 384})])
    page = build_page([run])
    assert "Memory by kind over time" in page and "There is no estimate" not in page
    (run,) = read_runs([profiled(tmp_path / "other", record, config={"hidden_size": "many"})])
    assert "There is no estimate of hal plan" in build_page([run])


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": "many"},
        {"seconds": math.inf},
        {"ops": [{"op": "linear"}]},
        {"steps": []},
        {"spans": [["phase", "forward", 1]]},
        {"collectives": [["world"]]},
        {"rank": None},
        {"phases": [1]},
        {"memory": {"times": [0.0], "bytes": {"weights": []}, "peak": {}}},
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, change):
    place = profiled(tmp_path, {**profile(), "rank": 0})
    (place / "profile" / "rank-0.json").write_text(json.dumps(profile() | change))
    with pytest.raises(ConfigError, match="no profile of a run"):
        read_profiles(place / "profile")


def tokenized(folder, name, kind, size, factor=1.0):
    losses = [[n, factor * y] for n, y in RECORD["losses"]]
    tokenizer = {"type": kind, "fingerprint": "0f", "bytes_per_token": size}
    return written(folder, name, tokenizer=tokenizer, losses=losses)


def test_runs_with_different_tokenizers_are_compared_in_bits_per_byte(tmp_path):
    """A token of four bytes that costs four times as much is the same model."""
    places = [tokenized(tmp_path, "bytes", "ByteTokenizer", 1.0), tokenized(tmp_path, "words", "X", 4.0, 4.0)]
    runs = read_runs(places)
    first, second = (run.bits_per_byte for run in runs)
    assert first[0] == [(n, pytest.approx(y)) for n, y in second[0]]
    assert first[0][0] == (1, pytest.approx(4.99 / math.log(2)))
    page = build_page(runs)
    assert "different tokenizers" in page and "loss (bits per byte)" in page
    assert "Difference from the first run" not in page


def test_without_the_bytes_of_a_token_the_page_says_so(tmp_path):
    places = [tokenized(tmp_path, "bytes", "ByteTokenizer", 1.0), tokenized(tmp_path, "ids", "NullTokenizer", None)]
    page = build_page(read_runs(places))
    assert "the records of ids do not tell how many bytes" in " ".join(page.split()) and "nats per token" in page


def test_the_same_tokenizer_is_compared_per_token(tmp_path):
    page = build_page(read_runs([tokenized(tmp_path, name, "X", 4.0) for name in ("one", "two")]))
    assert "different tokenizers" not in page and "loss (nats per token)" in page
    assert "Difference from the first run" in page
