"""Blended datasets: the samples equal Megatron's, index maps are built once, other tokenizers' data are refused."""

import json
import multiprocessing
import pickle
import time

import numpy
import pytest
import torch

from hal.cli import main
from hal.model.common.atomic_files import made_once
from hal.model.config.command_line import parse
from hal.model.config.schema import Config, ConfigError
from hal.model.data import gpt_dataset, megatron_datasets
from hal.model.data.indexed_dataset import note_path
from hal.model.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer

SIZES = {"a": 40, "b": 90, "c": 70}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def prefixes(tmp_path):
    """Three datasets; the ids of each begin at a different multiple of one hundred."""
    paths = {}
    for n, (name, documents) in enumerate(SIZES.items()):
        draw = numpy.random.default_rng(n)
        builder = megatron_datasets.indexed_dataset().IndexedDatasetBuilder(
            str(tmp_path / f"{name}.bin"), dtype=numpy.uint16
        )
        for _ in range(documents):
            ids = draw.integers(100 * n, 100 * n + 100, draw.integers(5, 40))
            builder.add_document(ids, [len(ids)])
        builder.finalize(str(tmp_path / f"{name}.idx"))
        paths[name] = str(tmp_path / name)
    return paths


def theirs(blend, sizes, split="8,1,1", per_split=None):
    """Megatron's own builder, which stores its index maps beside the data."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.utils import get_blend_from_list

    module = megatron_datasets.gpt_dataset()
    config = module.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=16,
        split=None if per_split else split,
        path_to_cache=None,
        tokenizer=NullTokenizer(300),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        blend=None if per_split else get_blend_from_list(blend),
        blend_per_split=[get_blend_from_list(b) for b in per_split] if per_split else None,
        mid_level_dataset_surplus=0.005,
    )
    return BlendedMegatronDatasetBuilder(module.GPTDataset, sizes, lambda: True, config).build()


def ours(sizes, **options):
    config = Config(**{"seq_length": 16, "split": "8,1,1", **options})
    return gpt_dataset.open_data(config, NullTokenizer(300), sizes)


@pytest.mark.parametrize(
    "words, count",
    [("0.3 a 0.7 b", 20), ("3 a 7 b 0.5 c", 100), ("a b", 30), ("a b c", 500), ("1 b", 40), ("c", 200)],
)
def test_samples_are_those_of_megatrons_builder(prefixes, words, count):
    blend = [prefixes.get(word, word) for word in words.split()]
    sizes = [count, 10, 5]
    expected = theirs(blend, sizes)
    splits = ours(dict(zip(gpt_dataset.SPLITS, sizes)), data_path=tuple(blend))
    for name, dataset, size in zip(gpt_dataset.SPLITS, expected, sizes):
        mine = splits[name].fetch(0, min(size, len(dataset)))[0]
        assert torch.equal(mine, torch.stack([dataset[n]["tokens"] for n in range(len(mine))]))


def test_shares_are_the_weights(prefixes):
    split = ours({"train": 2000}, data_path=("0.25", prefixes["a"], "0.75", prefixes["b"]))["train"]
    from_a = (split.fetch(0, 200)[0].float().mean(1) < 100).sum().item()
    assert abs(from_a - 50) <= 1
    # Each dataset has 0.5 % more than its share of the 2000 samples, since blending rounds.
    assert split.source["weights"] == [0.25, 0.75] and [n for *_, n in split.source["parts"]] == [503, 1508]
    thirds = ours({"train": 20}, data_path=("1", prefixes["a"], "2", prefixes["b"]))["train"]
    assert thirds.source["weights"] == [0.333333333333, 0.666666666667], "rounded, for a comparison of runs"


def test_a_path_per_split(prefixes):
    paths = {"train_data_path": ("2", prefixes["a"], "1", prefixes["b"]), "valid_data_path": (prefixes["c"],)}
    expected = theirs(
        None, [60, 10, 0], per_split=[list(paths["train_data_path"]), list(paths["valid_data_path"]), None]
    )
    splits = ours({"train": 60, "valid": 10}, **paths)
    for name, dataset in zip(("train", "valid"), expected):
        assert torch.equal(splits[name].fetch(0, 10)[0], torch.stack([dataset[n]["tokens"] for n in range(10)]))
    assert splits["valid"].fetch(0, 20)[0].min() >= 200
    with pytest.raises(ConfigError, match="there is no test data; give --test-data-path"):
        ours({"test": 5}, **paths)


@pytest.mark.parametrize(
    "words, message",
    [
        ("0.3 a b", "mixes weights and prefixes"),
        ("a b 0.5 c", "mixes weights and prefixes"),
        ("0 a 1 b", "weight 0; weights must be > 0"),
        ("-1 a 1 b", "weight -1; weights must be > 0"),
        ("1 a 0 b", "weight 0; weights must be > 0"),
        ("nan a 1 b", "weight nan"),
        ("inf a 1 b", "weight inf"),
    ],
)
def test_wrong_blends(words, message):
    with pytest.raises(ConfigError, match=message):
        gpt_dataset.parse_blend(tuple(words.split()), "--data-path")


@pytest.mark.parametrize("words", ["a inf", "1", "a b 3"])
def test_numbers_that_megatron_reads_as_prefixes(words):
    prefixes, weights = gpt_dataset.parse_blend(tuple(words.split()), "--data-path")
    assert [p.name for p in prefixes] == words.split() and weights is None


def test_a_blend_from_everywhere(tmp_path):
    (tmp_path / "c.yaml").write_text("data-path: [0.3, a, 0.7, b c]\n")
    expected = ("0.3", "a", "0.7", "b c")
    assert parse(["--config", str(tmp_path / "c.yaml")], {}).data_path == expected
    assert parse(["--data-path", "0.3", "a", "0.7", "b c"], {}).data_path == expected
    assert parse([], {"HAL_DATA_PATH": "0.3 a 0.7 'b c'"}).data_path == expected


def _fill(folder, log):
    def fill(beside):
        time.sleep(0.3)
        (beside / "map").write_text("whole")
        log.put(1)

    assert (made_once(folder, fill) / "map").read_text() == "whole"


def test_one_process_makes_the_maps_and_the_others_wait(tmp_path):
    context = multiprocessing.get_context("fork")
    log = context.Queue()
    processes = [context.Process(target=_fill, args=(tmp_path / "maps" / "x", log)) for _ in range(4)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(30)
    assert [p.exitcode for p in processes] == [0] * 4 and log.get(timeout=5) == 1 and log.empty()
    assert [p.name for p in (tmp_path / "maps").iterdir()] == ["x"]


def test_a_map_that_failed_is_made_by_the_next(tmp_path):
    with pytest.raises(RuntimeError):
        made_once(tmp_path / "m" / "x", lambda folder: (_ for _ in ()).throw(RuntimeError))
    assert list((tmp_path / "m").iterdir()) == []
    made_once(tmp_path / "m" / "x", lambda folder: (folder / "f").touch())
    assert (tmp_path / "m" / "x" / "f").exists()


def test_a_map_that_others_may_write_to_is_made_again(tmp_path):
    folder, made = tmp_path / "m" / "x", []

    def fill(new):
        made.append(new)
        (new / "f").touch()

    made_once(folder, fill)
    for name in ("f", "."):
        (folder / name).chmod(0o777)
        made_once(folder, fill)
        made_once(folder, fill)
        assert not (folder / name).stat().st_mode & 0o022
    assert len(made) == 3


class Bomb:
    def __reduce__(self):
        return (open, (BOMB, "w"))


@pytest.mark.parametrize("kind", ["pickle", "object array", "cut off"])
def test_a_pickle_in_place_of_an_index_map_is_not_opened(prefixes, tmp_path, kind):
    global BOMB
    BOMB = str(tmp_path / "exploded")
    options = {"data_path": ("0.5", prefixes["a"], "0.5", prefixes["b"])}
    ours({"train": 20}, **options)
    maps = sorted((tmp_path / "cache" / "index").rglob("*.npy"))
    assert {p.name.rsplit("-", 1)[-1] for p in maps} >= {"dataset_index.npy", "document_index.npy", "shuffle_index.npy"}
    for path in maps:
        whole = path.read_bytes()
        path.chmod(0o640)
        if kind == "pickle":
            path.write_bytes(pickle.dumps(Bomb()))
        elif kind == "object array":
            numpy.save(path, numpy.array([Bomb()], dtype=object), allow_pickle=True)
        else:
            path.write_bytes(whole[:-5])
        with pytest.raises(ConfigError, match="is not an index map"):
            gpt_dataset._require_plain(path)
        ours({"train": 20}, **options)  # its digest does not match, so it is built again
        assert path.read_bytes() == whole
    assert not (tmp_path / "exploded").exists()


@pytest.fixture
def text_data(tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({"text": f"document {n} of this corpus"}) + "\n" for n in range(200)))

    def make(*more):
        argv = ["data", "preprocess", "--input", str(path), "--output-prefix", str(tmp_path / "d")]
        assert main([*argv, "--tokenizer-type", "ByteTokenizer", *more]) == 0
        return str(tmp_path / "d_text_document")

    return make


def test_data_of_another_tokenizer_is_noticed(text_data):
    prefix = text_data("--append-eod")
    config = Config(seq_length=16, split="8,1,1", data_path=prefix)
    tokens = gpt_dataset.open_data(config, ByteTokenizer(), {"train": 4})["train"].fetch(0, 4)[0]
    assert "document" in ByteTokenizer().decode(tokens.flatten().tolist())
    with pytest.raises(ConfigError, match="was made with ByteTokenizer"):
        gpt_dataset.open_data(config, NullTokenizer(400), {"train": 4})
    gpt_dataset.open_data(config, NullTokenizer(256), {"train": 4})
    note_path(gpt_dataset.Path(prefix)).unlink()  # Megatron's own data has no such note, so nothing is compared
    gpt_dataset.open_data(config, NullTokenizer(400), {"train": 4})


@pytest.mark.parametrize("option", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_documents_without_ends_cannot_be_told_apart(text_data, option):
    config = Config(seq_length=16, split="8,1,1", data_path=text_data(), **{option: True})
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} would have no effect.*--append-eod"):
        gpt_dataset.open_data(config, ByteTokenizer(), {"train": 4})
