"""Prompts and continuations as text: the streamed text equals the complete text; batching does not change it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hal.model.config.schema import Config, ConfigError
from hal.model.data.tokenizers.tokenizer import ByteTokenizer, NullTokenizer
from hal.model.gpt.model import GPT
from hal.model.inference.engine import Engine
from hal.model.inference.sampling import Sampling
from hal.model.inference.text_generation import (
    IncrementalDetokenizer,
    Request,
    answer,
    cut,
    encode_prompt,
    read_prompts,
    stream_text,
)

BYTES = ByteTokenizer()


def in_pieces(ids, stop=(), tokenizer=BYTES):
    pieces = IncrementalDetokenizer(tokenizer, stop)
    parts = []
    for i in ids:
        parts.append(pieces.add(i))
        if pieces.stopped:
            break
    return [*parts, pieces.rest()], pieces.stopped


@given(st.text(), st.lists(st.text(min_size=1, max_size=3), max_size=3))
def test_pieces_make_the_text_before_the_first_stop(text, stop):
    parts, stopped = in_pieces(BYTES.encode(text), stop)
    joined = "".join(parts)
    expected, met = cut(text, stop)
    # Of two overlapping stop texts, the one that is completed first ends the text.
    ends = [at + len(s) for s in stop if (at := text.find(s)) >= 0]
    first = cut(text[: min(ends)], stop)[0] if ends else text
    assert joined == first and stopped == met
    assert expected == joined or len(ends) > 1


@given(st.binary())
def test_bytes_that_are_no_text_come_through_as_replacements(content):
    parts, _ = in_pieces(list(content))
    assert "".join(parts).replace("\ufffd", "") == content.decode(errors="ignore")


def test_characters_are_whole_and_stop_texts_are_held_back():
    parts, _ = in_pieces(BYTES.encode("aé€😀b"))
    assert [p for p in parts if p] == ["a", "é", "€", "😀", "b"]
    parts, stopped = in_pieces(BYTES.encode("one en two end three"), ["end"])
    assert stopped and "".join(parts) == "one en two " and "en" not in [p for p in parts if p][:4]
    parts, _ = in_pieces([3, 14, 15], tokenizer=NullTokenizer(20))
    assert parts == ["3", " 14", " 15", ""]


@pytest.fixture
def engine(cpu_ref):
    config = Config(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=24, vocab_size=257)
    config.init_method_std = 0.4
    return Engine(GPT(config, torch.device("cpu")).requires_grad_(False), 257)


def test_answers_do_not_depend_on_the_batch_and_samples_differ(engine):
    prompts = [encode_prompt(BYTES, text) for text in ("a long prompt", "b", "", "another")]
    request = Request(12, Sampling(), seed=4, samples=2)
    one, three, hundred = (answer(engine, BYTES, prompts, request, batch=b) for b in (1, 3, 100))
    assert one == three == hundred
    assert [len(a) for a in one] == [2] * 4 and all(a[0].text != a[1].text for a in one)
    assert answer(engine, BYTES, prompts, Request(12, Sampling(), seed=5, samples=2), batch=8) != one


def test_a_conversation_says_what_an_answer_says(engine):
    prompt = encode_prompt(BYTES, "to be")
    for stop in ((), ("e",)):
        request = Request(15, Sampling(0.8), seed=1, stop=stop)
        ((whole,),) = answer(engine, BYTES, [prompt], request, batch=1)
        assert "".join(piece for piece, _ in stream_text(engine, BYTES, prompt, request, 0)) == whole.text


def test_prompts_of_a_file(tmp_path):
    plain, lines = tmp_path / "p.txt", tmp_path / "p.jsonl"
    plain.write_text("one\n\nthree\n")
    assert read_prompts(plain) == ["one", "", "three"]
    lines.write_text('{"prompt": "one"}\n{"text": "two", "id": 3}\n')
    assert read_prompts(lines) == ["one", "two"]
    for content, message in (
        ('{"prompt": "one"}\n{', "line 2 is not valid JSON"),
        ('["x"]\n', 'line 1: expected an object with a string "prompt"'),
        ('{"prompt": 3}\n', "line 1: expected"),
        ("[" * 100_000, "line 1 is not valid JSON"),
    ):
        lines.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_prompts(lines)
    plain.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_prompts(plain)


def test_a_prompt_the_tokenizer_cannot_take_is_refused():
    with pytest.raises(ConfigError, match="prompt 'words': the tokenizer is NullTokenizer, so a text is ids"):
        encode_prompt(NullTokenizer(20), "words")
    assert encode_prompt(BYTES, "") == [BYTES.eod]
