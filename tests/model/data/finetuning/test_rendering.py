"""Examples are encoded as transformers encodes them, and the loss counts the tokens of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import finetuning
import pytest

from hal.model.config.command_line import build
from hal.model.config.schema import ConfigError
from hal.model.data.finetuning.examples import BadExample, Completion, Conversation
from hal.model.data.finetuning.rendering import Renderer
from hal.model.data.tokenizers.build import build_tokenizer

pytest.importorskip("transformers", reason="needs transformers (extra: transformers)")

ASK, ANSWER = {"role": "user", "content": "abc def"}, {"role": "assistant", "content": "gh a"}


def renderer(folder: Path, template: str | None = finetuning.MARKED, **options: Any) -> Renderer:
    finetuning.tokenizer(template).save_pretrained(folder)
    return made(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder), **options)


def made(**options: Any) -> Renderer:
    config = build({"sft": True, "data_path": "unused", **options})
    return Renderer(config, build_tokenizer(config))


def counted(of: Renderer, example: Completion | Conversation) -> str:
    """The text of the tokens that the loss counts."""
    ids, marks = of.encode(example)
    return str(of._tokenizer.decode([i for i, mark in zip(ids, marks) if mark]))


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    ours, theirs = renderer(tmp_path), finetuning.tokenizer()
    for example in finetuning.conversations(6):
        ids, _ = ours.encode(Conversation(example["messages"]))
        assert ids == theirs.apply_chat_template(example["messages"], tokenize=True, return_dict=True)["input_ids"]
    ids, _ = ours.encode(Completion("abc", " def"))
    assert ids == theirs("abc def</s>")["input_ids"] and ids[0] == theirs.bos_token_id


def test_the_loss_counts_the_answers_and_their_ends(tmp_path: Path) -> None:
    of = renderer(tmp_path)
    assert counted(of, Conversation([ASK, ANSWER, ASK, ANSWER])) == "gh a<|im_end|>gh a<|im_end|>"
    assert counted(of, Completion("abc", " def")) == " def</s>"
    assert counted(of, Completion("abc", " def</s>")) == " def</s>", "an end that is there is not added again"


def test_without_marks_an_answer_is_what_its_message_adds(tmp_path: Path) -> None:
    of = renderer(tmp_path, finetuning.UNMARKED)
    messages = [{"role": "system", "content": "a"}, ASK, ANSWER, ASK, ANSWER]
    assert counted(of, Conversation(messages)) == "gh a<|im_end|>\ngh a<|im_end|>\n"
    ids, _ = of.encode(Conversation(messages))
    assert ids == renderer(tmp_path / "marked").encode(Conversation(messages))[0]


def test_a_token_across_the_boundary_belongs_to_the_completion(tmp_path: Path) -> None:
    of = renderer(tmp_path)
    two = next(token for token in of._tokenizer.get_vocab() if len(token) == 2 and token.isalpha() and token.isascii())
    assert counted(of, Completion("!" + two[0], two[1])) == two + "</s>"


def test_a_given_template_replaces_the_tokenizers(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% else %}{% generation %}"
        "={{ m['content'] }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    of = renderer(tmp_path / "t", chat_template=str(path))
    assert counted(of, Conversation([ASK, ANSWER])) == "=gh a</s>"
    assert of.fingerprint != renderer(tmp_path / "t").fingerprint


def test_tokenizers_of_hal_are_used_through_transformers(tmp_path: Path) -> None:
    path = tmp_path / "own.jinja"
    path.write_text(finetuning.MARKED)
    of = made(chat_template=str(path))
    ids, marks = of.encode(Completion("abc", "d"))
    assert ids == [*b"abcd", 256] and marks == [False] * 3 + [True] * 2
    assert counted(of, Conversation([ASK, ANSWER])) == "gh a<|im_end|>"


def test_messages_need_a_template(tmp_path: Path) -> None:
    of = renderer(tmp_path, template=None)
    with pytest.raises(ConfigError, match="has no chat template; give one with --chat-template FILE"):
        of.encode(Conversation([ASK, ANSWER]))
    assert counted(of, Completion("abc", " def")) == " def</s>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "it cannot be encoded: roles must alternate"),
        ("{% for m in messages %}{{ m.content.strip(7) }}{% endfor %}", "it cannot be encoded"),
        ("{{ ''.__class__.__mro__ }}", "it cannot be encoded"),
        ("{% for m in messages %}", "it cannot be encoded"),
        ("{% generation %}{% endgeneration %}{{ messages[0].content }}", "it cannot be encoded"),
        (
            "{% if tools %}{% generation %}{% endgeneration %}{% endif %}a",
            "the chat template marks no token of an answer",
        ),
        # The last answer is rendered otherwise than the earlier ones.
        ("{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }}{% endfor %}", "message 2: the chat"),
    ],
)
def test_what_a_template_refuses_is_refused(template: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(BadExample) as caught:
        renderer(tmp_path, template).encode(Conversation([ASK, ANSWER, ASK, ANSWER]))
    assert reason in str(caught.value)


def test_a_tokenizer_without_tokenizer_json_is_refused() -> None:
    with pytest.raises(ConfigError, match="--tokenizer-type NullTokenizer is not; give --tokenizer-type HuggingFace"):
        made(tokenizer_type="NullTokenizer", vocab_size=9)


def test_without_transformers_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"--sft needs transformers.*pip install 'torch-hal\[transformers\]'"):
        made()
