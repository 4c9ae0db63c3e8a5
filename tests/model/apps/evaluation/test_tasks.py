"""Scores equal an independent computation on the same model, window by window and word by word."""

from __future__ import annotations

import json
import math

import pytest
import torch

from hal.model.config import Config, ConfigError
from hal.model.evaluation.scoring import Example, Measured, mean, per_token, perplexity, score
from hal.model.evaluation.tasks import detokenise_wikitext, lambada, wikitext
from hal.model.gpt import GPT
from hal.model.inference import Engine, NotFinite
from hal.model.tokenizer import ByteTokenizer, NullTokenizer

BYTES, LENGTH = ByteTokenizer(), 24
TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "one two three four five six seven eight nine ten",
    "x yz",
    "The end. The end.",
]


@pytest.fixture
def engine(cpu_ref):
    config = Config(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=LENGTH, init_method_std=0.3)
    config.set_vocabulary(257)
    return Engine(GPT(config, torch.device("cpu")).requires_grad_(False), 257)


def alone(engine, ids, first):
    """Independent of batches, padding and cross entropy: one sequence, log-softmax over the real ids in float64.
    (negative log-likelihood, whether all are likeliest) of ids[first:]."""
    logits = engine.model(torch.tensor([ids[:-1]]))[:, 0, :257].double()
    known = torch.log_softmax(logits, -1)
    labels = ids[1:]
    rows = range(first - 1, len(labels))
    return -sum(known[r, labels[r]].item() for r in rows), all(int(logits[r].argmax()) == labels[r] for r in rows)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
def test_lambada_is_scored_as_defined(engine, tmp_path, strict, batch):
    # Make one of the answers the model's own, so that not all are wrong.
    with torch.no_grad():
        made = list(BYTES.encode("a dog"))
        made[-1] = int(engine.model(torch.tensor([made[:-1]]))[-1, 0, :128].argmax())
    texts = [*TEXTS, bytes(made).decode()]
    path = tmp_path / "any name"
    path.write_text("\n\n".join(json.dumps({"text": t}) for t in texts) + "\n")
    task = lambada(path, BYTES, LENGTH, strict=strict)
    got = task.results(score(engine, task.examples, batch=batch))
    right, losses = [], []
    for text in texts:
        if strict:
            last = text.split()[-1]
            context, label = list(text[: text.rindex(last)].strip().encode()), list(f" {last}".encode())
        else:
            context, label = list(text.encode())[:-1], list(text.encode())[-1:]
        ids = (context + label)[-LENGTH - 1 :]
        loss, is_right = alone(engine, ids, len(ids) - len(label))
        losses.append(loss)
        right.append(is_right)
    assert got["number correct"] == sum(right) and got["total examples"] == len(texts)
    assert got["avg accuracy"] == pytest.approx(sum(right) / len(texts))
    assert got["loss per word"] == pytest.approx(sum(losses) / len(texts), rel=1e-5)
    assert got["shortened contexts"] == 1 and (strict or sum(right) >= 1)


@pytest.mark.parametrize("move", [1, 5, LENGTH, None])
def test_wikitext_is_scored_as_defined(engine, tmp_path, move):
    raw = " = A title = \n\n The cat , the dog @-@ house ( and so on ) ; it costs 3 @,@ 000 . \n It 's fine .\r\n"
    path = tmp_path / "lambada.jsonl"  # the name decides nothing
    path.write_bytes(raw.encode())
    task = wikitext(path, BYTES, LENGTH, overlapping_eval=move)
    got = task.results(score(engine, task.examples, batch=4))
    ids, step = list(detokenise_wikitext(raw).encode()), move or LENGTH
    # Megatron's windows: start every `step`, all labels of the first count, the last `step` of the others.
    seen = {}
    for start in range(0, len(ids) - 1, step):
        window = ids[start : start + LENGTH + 1]
        for at in range(1 if start == 0 else LENGTH - step + 1, len(window)):
            assert start + at not in seen
            seen[start + at] = alone(engine, window[: at + 1], at)[0]
    assert sorted(seen) == list(range(1, len(ids)))
    loss, ratio = sum(seen.values()) / len(seen), (len(ids) - 1) / (len(raw.strip().split(" ")) - 1)
    assert got["avg loss"] == pytest.approx(loss, rel=1e-5) and got["token ratio"] == pytest.approx(ratio)
    assert got["ppl"] == pytest.approx(math.exp(min(20, loss)), rel=1e-4)
    assert got["adjusted ppl"] == pytest.approx(math.exp(min(20, loss * ratio)), rel=1e-4)
    assert got["tokens"] == len(ids) - 1


@pytest.mark.parametrize(
    "text, want",
    [
        (" = = Title = = \n The dogs ' house , ( which is ) red", " == Title ==\nThe dogs' house, (which is) red"),
        (
            "3 @,@ 000 @.@ 5 a @-@ b \N{DEGREE SIGN} C ; [ x ] : { y } ! z .",
            "3,000.5 a-b\N{DEGREE SIGN}C; [x]: {y}! z .",
        ),
        ('It \'s " so " , N x ? y\n', 'It\'s "so", 1 x? y\n'),
        ("an ' odd ' N one", "an 'odd' 1 one"),
    ],
)
def test_detokenisation_is_megatrons(text, want):
    assert detokenise_wikitext(text) == want


def test_padding_gets_no_probability(engine):
    # Whatever the padded rows hold, scores do not move.
    examples = [Example(tuple(BYTES.encode("the cat")), 3)]
    before = score(engine, examples, batch=1)
    engine.model.embedding.word_embeddings.weight[257:] = 5.0
    assert torch.equal(score(engine, examples, batch=1), before)


@pytest.mark.parametrize(
    "content, reason",
    [
        ('{"text": "two words"}\n{"text": ', "line 2 is no JSON"),
        ('\n\n{"txt": "two words"}', 'line 3: expected an object with a "text"'),
        ('["text"]', 'line 1: expected an object with a "text"'),
        ('{"text": ""}', "line 1: a text needs at least two"),
        ('{"text": "x"}', "line 1: a text needs at least two"),
        ("", "has no texts"),
        (f'{{"text": "a {"b" * 99}"}}', "the last word has 100 tokens"),
        ("[" * 100_000, "line 1 is no JSON"),
        (b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_broken_data_is_refused_with_its_line(tmp_path, content, reason):
    path = tmp_path / "data"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=reason):
        lambada(path, BYTES, LENGTH, strict=True)


def test_texts_that_cannot_be_measured_are_refused(tmp_path):
    path = tmp_path / "data"
    path.write_text("x")
    with pytest.raises(ConfigError, match="nothing to measure"):
        wikitext(path, BYTES, LENGTH, overlapping_eval=4)
    path.write_text("some words")
    with pytest.raises(ConfigError, match="the tokenizer cannot encode"):
        wikitext(path, NullTokenizer(5), LENGTH, overlapping_eval=4)
    for move in (0, LENGTH + 1):
        with pytest.raises(ConfigError, match="must be between 1 and"):
            wikitext(path, BYTES, LENGTH, overlapping_eval=move)


def test_standard_errors():
    values = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)
    assert mean(values).stderr == pytest.approx(math.sqrt(0.75 * 0.25 / 3))
    assert mean(values[:1]).stderr is None
    # Equal counts: the error of a mean of means. Unequal: agrees with a simulation.
    nll = torch.tensor([3.0, 5.0, 4.0, 8.0], dtype=torch.float64)
    scores = torch.stack([nll, torch.zeros(4), torch.full((4,), 2.0)], 1).double()
    assert per_token(scores) == Measured(2.5, pytest.approx(mean(nll / 2).stderr))
    draw = torch.Generator().manual_seed(0)
    count = torch.randint(1, 9, (4000, 50), generator=draw).double()
    nll = count * 2.0 + count.sqrt() * torch.randn(4000, 50, generator=draw, dtype=torch.float64)
    runs = [per_token(torch.stack([n, torch.zeros(50).double(), c], 1)) for n, c in zip(nll, count)]
    spread = torch.tensor([r.value for r in runs]).std().item()
    assert sum(r.stderr for r in runs) / len(runs) == pytest.approx(spread, rel=0.05)
    assert perplexity(Measured(1.0, 0.1), 2.0) == Measured(math.exp(2), pytest.approx(0.2 * math.exp(2)))
    assert perplexity(Measured(50.0, None)).value == math.exp(20)


def test_losses_that_are_no_numbers_are_an_error(engine):
    examples = [Example((1, 2, 3), 2), Example((4, 5), 1)]
    with torch.no_grad():
        engine.model.embedding.word_embeddings.weight[4] = float("nan")
    with pytest.raises(NotFinite, match="the losses of 2 of 2 sequences are not finite"):
        score(engine, examples, batch=1)
