"""An exported folder holds everything that turns text into ids: AutoTokenizer gives the ids that HAL gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from models import GPT2, assert_equal_weights, random_weights

from hal.cli.convert import main
from hal.model.apps.convert import hal_format, huggingface
from hal.model.apps.convert.weights import ConversionError, Weights
from hal.model.data.tokenizers.build import build_tokenizer

transformers = pytest.importorskip("transformers", reason="exports are held against transformers (extra: test)")
tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers (extra: train)")
pytest.importorskip("safetensors", reason="needs safetensors (extra: convert)")

TEXTS = ["the cat sat", "  Two  spaces,\n\ta tab; ünïcode 日本 \x00\x7f", "it's 12,345.67 isn't it?", "", "zzz"]
CORPUS = ["the cat sat on the mat", "it's the cat's mat, isn't it?", "two cats, 12 mats"] * 4
MESSAGES = [{"role": "user", "content": "hi"}]


def byte(folder: Path) -> dict[str, Any]:
    return {"tokenizer_type": "ByteTokenizer"}


def gpt2(folder: Path) -> dict[str, Any]:
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(CORPUS, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    made.save_model(str(folder))
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return {"tokenizer_type": "GPT2BPETokenizer", **files}


def wordpiece(folder: Path) -> dict[str, Any]:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz,'12?", "##at", "the", "##s"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    return {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": str(folder / "vocab.txt")}


def whitespace(folder: Path) -> dict[str, Any]:
    words = ["<unk>", "<|endoftext|>", "the", "cat", "sat", "it's"]
    (folder / "words.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    return {"tokenizer_type": "WhitespaceTokenizer", "vocab_file": str(folder / "words.json")}


def hugging_face(folder: Path) -> dict[str, Any]:
    gpt2(folder)
    made = tokenizers.ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    made.add_special_tokens(["<|endoftext|>", "<|user|>"])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "max_new_tokens": 7}))
    return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder / "tokenizer.json")}


def with_tokenizer(options: dict[str, Any]) -> tuple[Weights, Any]:
    """Random weights with one row per id of a tokenizer, and the tokenizer."""
    size = random_weights(GPT2).config(make_vocab_size_divisible_by=1, **options)
    tokenizer = build_tokenizer(size)
    weights = random_weights(GPT2, vocabulary=tokenizer.vocab_size)
    weights.tokenizer = options
    return weights, tokenizer


@pytest.mark.parametrize("make", [byte, gpt2, wordpiece, whitespace, hugging_face])
def test_auto_tokenizer_gives_hals_ids(make: Any, tmp_path: Path, capsys: Any) -> None:
    files = tmp_path / "files"
    files.mkdir()
    weights, ours = with_tokenizer(make(files))
    hal_format.write(weights, tmp_path / "ours")
    assert main(["--load", str(tmp_path / "ours"), "--save", str(tmp_path / "theirs"), "--saver", "huggingface"]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids, text
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == ours.decode(ids), text
    assert theirs.eos_token_id == ours.eod and len(theirs) == ours.vocab_size
    config = transformers.GenerationConfig.from_pretrained(tmp_path / "theirs")
    assert config.eos_token_id == ours.eod
    if make is hugging_face:
        assert config.max_new_tokens == 7 and theirs.model_max_length == 77
        assert theirs.apply_chat_template(MESSAGES, tokenize=False) == "<|user|>hi"
        assert "note" not in capsys.readouterr().out
    else:
        rendered = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
        assert rendered == "user: hi\nassistant:"
        assert "note: the chat template is a plain one" in capsys.readouterr().out
    # HAL reads the folder back with the same ids.
    again = huggingface.read(tmp_path / "theirs")
    back = build_tokenizer(again.config(make_vocab_size_divisible_by=1))
    assert all(back.encode(text) == ours.encode(text) for text in TEXTS) and back.eod == ours.eod


SETTINGS = {
    "tokenizer_class": "GPT2Tokenizer",
    "eos_token": "<|endoftext|>",
    "model_max_length": 77,
    "chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}",
}


def a_folder(folder: Path, settings: dict[str, Any] | None, vocabulary: int) -> Weights:
    """A model as transformers writes it beside the tokenizer files of `folder`."""
    huggingface.write(random_weights(GPT2, vocabulary), folder / "model")
    for path in (folder / "model").iterdir():
        path.rename(folder / path.name)
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return huggingface.read(folder)


def test_a_vocabulary_and_merges_keep_the_settings_of_their_folder(tmp_path: Path) -> None:
    gpt2(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 5], "top_k": 7}))
    weights = a_folder(tmp_path, SETTINGS, 300)
    assert weights.tokenizer["tokenizer_type"] == "GPT2BPETokenizer"
    assert huggingface.write(weights, tmp_path / "back") == []
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert theirs.model_max_length == 77 and theirs.apply_chat_template(MESSAGES, tokenize=False) == "[hi]"
    config = transformers.GenerationConfig.from_pretrained(tmp_path / "back")
    assert (config.eos_token_id, config.top_k) == ([0, 5], 7)


def test_a_model_with_more_ids_than_its_tokenizer_keeps_them(tmp_path: Path) -> None:
    gpt2(tmp_path)
    weights = a_folder(tmp_path, SETTINGS, 320)
    assert build_tokenizer(weights.config(make_vocab_size_divisible_by=1)).vocab_size < 320
    hal_format.write(weights, tmp_path / "ours")
    back = hal_format.read(tmp_path / "ours")
    assert back.vocabulary == 320 and hal_format.read(tmp_path / "ours", vocabulary=300).vocabulary == 300
    assert_equal_weights(weights, back)


def test_files_that_several_tokenizers_read_differently_are_refused(tmp_path: Path) -> None:
    gpt2(tmp_path)
    with pytest.raises(ConversionError, match=r"has a Qwen2Tokenizer and no tokenizer.json; transformers writes"):
        a_folder(tmp_path, {"tokenizer_class": "Qwen2Tokenizer"}, 300)


@pytest.mark.slow
def test_a_sentencepiece_model_is_found_and_copied(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece (extra: train)")
    (tmp_path / "text").write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    settings = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": False, "eos_token": "</s>"}
    weights = a_folder(tmp_path, settings, 300)
    ours = build_tokenizer(weights.config(make_vocab_size_divisible_by=1))
    (note,) = huggingface.write(weights, tmp_path / "back")
    assert "chat template" in note
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in ["the cat sat", "two  cats ", "ünï"]:
        assert theirs(text)["input_ids"] == ours.encode_prompt(text), text
    again = huggingface.read(tmp_path / "back")
    assert again.tokenizer["tokenizer_type"] == "Llama2Tokenizer"
    (tmp_path / "back" / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert huggingface.read(tmp_path / "back").tokenizer["tokenizer_type"] == "GPTSentencePieceTokenizer"


def test_a_model_without_a_tokenizer_keeps_its_generation_settings(tmp_path: Path) -> None:
    settings = {"bos_token_id": 3, "eos_token_id": [4, 5], "temperature": 0.5, "do_sample": True}
    huggingface.write(random_weights(GPT2, 300), tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").write_text(json.dumps(settings))
    weights = huggingface.read(tmp_path / "theirs")
    hal_format.write(weights, tmp_path / "ours")
    back = hal_format.read(tmp_path / "ours")
    assert build_tokenizer(back.config(make_vocab_size_divisible_by=1)).ends == {4, 5}
    for name, source in (("direct", weights), ("back", back)):
        (note,) = huggingface.write(source, tmp_path / name)
        assert "no tokenizer was written" in note
        assert json.loads((tmp_path / name / "generation_config.json").read_text()) == settings
        assert json.loads((tmp_path / name / "config.json").read_text())["eos_token_id"] == 4
    (tmp_path / "theirs").rename(tmp_path / "elsewhere")
    (note,) = huggingface.write(back, tmp_path / "gone")
    assert "theirs of the NullTokenizer is not a folder" in note


def test_a_chat_template_can_be_given(tmp_path: Path, capsys: Any) -> None:
    weights, _ = with_tokenizer(byte(tmp_path))
    hal_format.write(weights, tmp_path / "ours")
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    export = ["--load", str(tmp_path / "ours"), "--saver", "huggingface", "--save", str(tmp_path / "theirs")]
    assert main([*export, "--chat-template", str(tmp_path / "chat.jinja")]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert theirs.apply_chat_template(MESSAGES, tokenize=False) == "[hi]"
    assert "note" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--load", "x", "--saver", "hal", "--save", "y", "--chat-template", "chat.jinja"])
    assert "is for --saver huggingface" in capsys.readouterr().err


def test_what_cannot_be_expressed_is_said(tmp_path: Path, capsys: Any) -> None:
    weights = random_weights(GPT2)
    weights.tokenizer = {"tokenizer_type": "NullTokenizer", "vocab_size": 100}
    (note,) = huggingface.write(weights, tmp_path / "null")
    assert "tokenizer.json cannot express NullTokenizer" in note
    assert not (tmp_path / "null" / "tokenizer_config.json").exists()
    assert json.loads((tmp_path / "null" / "generation_config.json").read_text())["eos_token_id"] == 100
    weights.tokenizer = {**gpt2(tmp_path), "merge_file": str(tmp_path / "gone.txt")}
    (note,) = huggingface.write(weights, tmp_path / "gone")
    assert "gone.txt does not exist" in note and "before AutoTokenizer is used" in note
    weights.tokenizer = {"tokenizer_type": "ByteTokenizer"}
    (note,) = huggingface.write(weights, tmp_path / "small")
    assert "257 ids, the embedding only 101" in note
