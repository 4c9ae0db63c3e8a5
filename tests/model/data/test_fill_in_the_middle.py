"""--fim-data: what a rearranged text consists of, how often texts are rearranged, and what stays as it is."""

from __future__ import annotations

import numpy
import pytest
import torch

from hal.model.config.command_line import build
from hal.model.config.schema import Config, ConfigError
from hal.model.data import gpt_dataset
from hal.model.data.fill_in_the_middle import Rearrangement
from hal.model.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer
from hal.model.training.experiment import differences

TOKENS = {f"fim_{name}_token": token for name, token in zip(("prefix", "middle", "suffix", "pad"), "\1\2\3\4")}
P, M, S, PAD = range(1, 5)
EOD = ByteTokenizer.eod


def rearranged(text: bytes, sample: int = 0, **options: object) -> list[int]:
    config = Config(**{"fim_data": True, "fim_rate": 1.0, **TOKENS, **options})
    ids = numpy.array([EOD if byte == ord("|") else byte for byte in text])
    result = Rearrangement(config, ByteTokenizer(), 0)(ids, sample)
    assert result.dtype == numpy.int64 and len(result) == len(text)
    return [int(i) for i in result]


def original(ids: list[int]) -> tuple[list[int], str]:
    """The text that a rearranged one was made of, and the order of its parts."""
    if ids[:2] == [P, S]:
        middle = ids.index(M)
        return ids[middle + 1 :] + ids[2:middle], "SPM"
    suffix, middle = ids.index(S), ids.index(M)
    return ids[1:suffix] + ids[middle + 1 :] + ids[suffix + 1 : middle], "PSM"


def test_parts_of_the_text_change_places() -> None:
    """Padding of the input leaves room for the three tokens; with the prefix and the middle joined in one order, where
    they meet is not known, so whole texts are compared."""
    text = bytes(range(ord("a"), ord("z") + 1)).decode()
    orders = set()
    for sample in range(40):
        config = Config(fim_data=True, fim_rate=1.0, **TOKENS)
        random = numpy.random.RandomState(sample)
        ids = Rearrangement(config, ByteTokenizer(), 0)._text(numpy.array(list(text.encode())), 1.0, random)
        parts, order = original([int(i) for i in ids])
        orders.add(order)
        if order == "PSM":
            assert bytes(parts).decode() == text
        else:
            assert sorted(parts) == sorted(text.encode()) and bytes(parts).decode() in text + text
    assert orders == {"PSM", "SPM"}


def test_documents_are_rearranged_by_themselves() -> None:
    first, second, third = b"aaaaaaaa", b"bbbbbbbb", b"cccccccccccccccccccc"
    for sample in range(20):
        ids = rearranged(first + b"|" + second + b"|" + third, sample)
        assert ids[11] == EOD and ids[23] == EOD
        for part, letter in ((ids[:11], b"a"), (ids[12:23], b"b"), (ids[24:], b"c")):
            assert part[0] == P and set(part) <= {P, M, S, *letter}
    assert rearranged(b"||" + first + b"|" * 9)[:12] == [*rearranged(first + b"|" * 9)[:11], EOD]


def test_rates() -> None:
    text = b"some text of a document"

    def share(count: int, **options: object) -> float:
        return sum(rearranged(text, n, **options)[0] == P for n in range(count)) / count

    assert share(400) == 1.0
    assert 0.24 < share(800, fim_rate=0.3) < 0.36
    spm = [rearranged(text, n, fim_spm_rate=0.2)[1] == S for n in range(800)]
    psm_with_an_empty_prefix = 1 / (len(text) + 1)
    assert 0.14 < sum(spm) / 800 < 0.26 + 2 * psm_with_an_empty_prefix


def test_fragments_have_a_rate_of_their_own() -> None:
    options = {"fim_split_sample": "#", "fim_fragment_rate": 0.5}
    counts = [
        sum(part[:1] == [P] for part in _split(rearranged(b"aaaa#bbbb#cccc" + b"d" * 40, n, **options), ord("#")))
        for n in range(300)
    ]
    assert set(counts) == {0, 1, 2, 3} and 1.3 < sum(counts) / 300 < 1.7
    whole = [rearranged(b"aaaa#bbbb", n, **options, fim_rate=1e-9) for n in range(20)]
    assert whole == [list(b"aaaa#bbbb")] * 20


def _split(ids: list[int], separator: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for i in ids:
        parts.append([]) if i == separator else parts[-1].append(i)
    return parts


def test_texts_with_a_given_beginning_stay() -> None:
    assert rearranged(b"#!shell", fim_no_prefix="#!") == list(b"#!shell")
    assert rearranged(b"# shell", fim_no_prefix="#!")[0] == P


def test_a_shorter_text_is_padded() -> None:
    """Bytes that are no text shrink when they are decoded and encoded, here to nothing."""

    class Dropping(ByteTokenizer):
        def decode(self, ids: object) -> str:
            return ""

    config = Config(fim_data=True, fim_rate=1.0, fim_spm_rate=1e-9, **TOKENS)
    ids = Rearrangement(config, Dropping(), 0)(numpy.arange(65, 75), 0)
    assert ids.tolist() == [P, S, M] + [PAD] * 7


def test_other_tokens_are_named_at_once() -> None:
    config = Config(fim_data=True, fim_split_sample="<file>", fim_fragment_rate=0.5, fim_pad_token="\4")
    missing = "--fim-prefix-token <fim_prefix>, --fim-middle-token <fim_middle>, --fim-suffix-token <fim_suffix>, "
    with pytest.raises(ConfigError, match=f"no such tokens: {missing}--fim-split-sample <file>; give"):
        Rearrangement(config, ByteTokenizer(), 0)
    with pytest.raises(ConfigError, match="NullTokenizer has no such tokens"):
        Rearrangement(Config(tokenizer_type="NullTokenizer", vocab_size=9), NullTokenizer(9), 0)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"sft": True, "data_path": ("x",)}, "--fim-data and --sft contradict"),
        ({"mock_data": True}, "--fim-data and --mock-data contradict"),
        ({"fim_split_sample": "#"}, "--fim-split-sample needs --fim-fragment-rate"),
        ({"fim_rate": 1.5}, "--fim-rate must be in"),
    ],
)
def test_contradictions(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build({"backend": "cpu_ref", "fim_data": True, **options})


def test_samples_of_a_dataset(tmp_path, monkeypatch) -> None:
    """Samples depend on their numbers alone, and a checkpoint names a change of the options."""
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"the text of document {n} is here" for n in range(400)))
    common = {"seq_length": 64, "text_file": str(text), "split": "8,1,1"}

    def split(name: str = "train", **options: object):
        config = Config(**{**common, "fim_data": True, "fim_rate": 1.0, **TOKENS, **options})
        return config, gpt_dataset.open_data(config, ByteTokenizer(), {name: 20})[name]

    config, train = split()
    tokens, labels = train.fetch(0, 8)
    assert torch.equal(tokens[:, 1:], labels[:, :-1]) and (tokens[:, 0] == P).all()
    again = split()[1]
    assert torch.equal(again.fetch(5, 2)[0], tokens[5:7])
    plain = gpt_dataset.open_data(Config(**common), ByteTokenizer(), {"train": 20})["train"]
    assert not (plain.fetch(0, 8)[0] == M).any()

    state = {"data": {"train": train.source}}
    assert differences(state, config, {"train": again}, tmp_path) == []
    other, changed = split(fim_rate=0.5)
    with pytest.raises(ConfigError, match=r"rearranged otherwise \(--fim-data and its options\)"):
        differences(state, other, {"train": changed}, tmp_path)
    with pytest.raises(ConfigError, match="rearranged otherwise"):
        differences(state, Config(**common), {"train": plain}, tmp_path)
