"""Tokenizers: decoding returns the encoded text, and every id is inside the vocabulary."""

import base64
import io
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.model.config.schema import Config, ConfigError
from hal.model.config.tokenizer_options import KINDS
from hal.model.data import text_corpus
from hal.model.data.indexed_dataset import read_index
from hal.model.data.tokenizers.build import build_tokenizer
from hal.model.data.tokenizers.tokenizer import ByteTokenizer, InvalidText, NullTokenizer, WhitespaceTokenizer
from hal.model.data.tokenizers.vocabularies import GPT2BPETokenizer


@pytest.fixture(scope="module")
def bpe_files(tmp_path_factory):
    """A small byte-level BPE in GPT-2's two files."""
    from tokenizers import ByteLevelBPETokenizer

    trained = ByteLevelBPETokenizer()
    lines = [f"the cat {n} sat on the mat, über {n % 7} 字" for n in range(200)]
    trained.train_from_iterator(lines, vocab_size=320, special_tokens=["<|endoftext|>"])
    folder = tmp_path_factory.mktemp("bpe")
    trained.save_model(str(folder))
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def test_a_text_that_cannot_be_encoded_is_an_error_of_one_line():
    for tokenizer, text in (
        (NullTokenizer(9), "word"),
        (NullTokenizer(9), "10"),
        (NullTokenizer(9), "9" * 5000),
        (ByteTokenizer(), "\ud800"),
    ):
        with pytest.raises(InvalidText) as caught:
            tokenizer.encode(text)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@given(st.text(st.characters(codec="utf-8")))
def test_bytes_come_back(text):
    ids = ByteTokenizer().encode(text)
    assert ByteTokenizer().decode(ids) == text and all(0 <= i < 256 for i in ids)


def test_any_bytes_decode():
    assert ByteTokenizer().decode([0xFF, 65, 256]) == "\ufffdA"


def test_gpt2_bpe(bpe_files):
    tokenizer = build_tokenizer(
        Config(tokenizer_type="GPT2BPETokenizer", vocab_file=bpe_files[0], merge_file=bpe_files[1])
    )
    assert isinstance(tokenizer, GPT2BPETokenizer)
    ids = tokenizer.encode("the cat sat, über 字 <new>")
    assert tokenizer.decode(ids) == "the cat sat, über 字 <new>" and max(ids) < tokenizer.vocab_size
    assert len(tokenizer.encode("the cat")) < 7  # merges are used
    assert tokenizer.eod == 0


def test_a_text_file_in_bpe(bpe_files, tmp_path, monkeypatch):
    monkeypatch.setenv("HAL_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "t.txt"
    path.write_text("the cat sat on the mat\n" * 50)
    tokenizer = GPT2BPETokenizer(*bpe_files)
    prefix = text_corpus.text_file(str(path), tokenizer)
    assert read_index(prefix).lengths.sum() == len(tokenizer.encode(path.read_text())) + 1
    assert text_corpus.text_file(str(path), ByteTokenizer()) != prefix  # another tokenizer, another cache entry


def test_wrong_files_are_named(bpe_files, tmp_path):
    with pytest.raises(ConfigError, match="absent does not exist"):
        GPT2BPETokenizer("absent", bpe_files[1])
    broken = tmp_path / "vocab.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match="not a GPT-2 vocabulary"):
        GPT2BPETokenizer(str(broken), bpe_files[1])
    broken.write_text('{"a": 0}')
    empty = tmp_path / "merges.txt"
    empty.write_text("#version: 0.2\n")
    with pytest.raises(ConfigError, match="endoftext"):
        GPT2BPETokenizer(str(broken), str(empty))


def test_null_tokenizer():
    tokenizer = NullTokenizer(10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10) and tokenizer.decode(tokenizer.encode("3 4")) == "3 4"


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*SPECIAL, "the", "un", "##aff", "##able", "cafe", "café", "##s", ".", "[", "]"]
LINES = [f"the quick brown fox {n} jumps over the lazy dog {n % 9}" for n in range(300)]


@pytest.fixture(scope="module")
def files(tmp_path_factory, bpe_files):
    """Options of every kind of tokenizer, with small files created here."""
    import sentencepiece
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE

    folder = tmp_path_factory.mktemp("vocabularies")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (folder / "words.json").write_text(json.dumps({"<unk>": 0, "<|endoftext|>": 1, "the": 2, "fox": 7}))
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=model, vocab_size=60, minloglevel=2
    )
    (folder / "pieces.model").write_bytes(model.getvalue())
    pipeline = Tokenizer(BPE())
    pipeline.pre_tokenizer, pipeline.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    pipeline.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=100, special_tokens=["<s>", "</s>"]))
    pipeline.save(str(folder / "tokenizer.json"))
    pieces = {"tokenizer_model": str(folder / "pieces.model")}
    return {
        "ByteTokenizer": {},
        "NullTokenizer": {"vocab_size": 10},
        "GPT2BPETokenizer": {"vocab_file": bpe_files[0], "merge_file": bpe_files[1]},
        "BertWordPieceLowerCase": {"vocab_file": str(folder / "vocab.txt")},
        "BertWordPieceCase": {"vocab_file": str(folder / "vocab.txt")},
        "WhitespaceTokenizer": {"vocab_file": str(folder / "words.json")},
        "SentencePieceTokenizer": pieces,
        "GPTSentencePieceTokenizer": pieces,
        "Llama2Tokenizer": pieces,
        "HuggingFaceTokenizer": {"tokenizer_model": str(folder / "tokenizer.json")},
    }


def make(kind, options):
    return build_tokenizer(Config(tokenizer_type=kind, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_ids_of_its_vocabulary_and_no_text_ends_a_document(kind, files):
    tokenizer = make(kind, files[kind])
    texts = (
        ["3 4"]
        if kind == "NullTokenizer"
        else ["the fox <|endoftext|> </s> <EOD> [EOS] [SEP]", "", "\u00fcber \U0001f600"]
    )
    for text in texts:
        ids = tokenizer.encode(text)
        assert all(0 <= i < tokenizer.vocab_size for i in ids) and tokenizer.eod not in ids
        assert isinstance(tokenizer.decode([*ids, tokenizer.eod]), str)
    assert 0 <= tokenizer.eod < tokenizer.vocab_size


@pytest.mark.parametrize(
    "kind", ["GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer", "HuggingFaceTokenizer"]
)
def test_texts_come_back(kind, files):
    tokenizer = make(kind, files[kind])
    ids = tokenizer.encode(LINES[7])
    assert tokenizer.decode(ids) == LINES[7] and len(ids) <= len(LINES[7])


def test_word_pieces_are_the_longest_that_fit(files):
    lower, case = (make(f"BertWordPiece{c}", files["BertWordPieceCase"]) for c in ("LowerCase", "Case"))
    assert [WORDS[i] for i in lower.encode("The unaffable cafés.")] == [
        "the",
        "un",
        "##aff",
        "##able",
        "cafe",
        "##s",
        ".",
    ]
    assert [WORDS[i] for i in case.encode("The cafés")] == ["[UNK]", "café", "##s"]
    assert [WORDS[i] for i in case.encode("[SEP] " + "the" * 67)] == ["[", "[UNK]", "]", "[UNK]"]  # 201 letters
    assert lower.decode(lower.encode("The unaffable")) == "the unaffable"
    # Megatron appends [BOS] and [EOS]
    assert (lower.vocab_size, lower.eod) == (len(WORDS) + 2, len(WORDS) + 1)
    assert make("BertWordPieceCase", {**files["BertWordPieceCase"], "vocab_extra_ids": 3}).vocab_size == len(WORDS) + 5


def test_special_ids_of_sentence_pieces(files):
    plain, megatron, llama = (
        make(kind, files["Llama2Tokenizer"])
        for kind in ("GPTSentencePieceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer")
    )
    assert plain.vocab_size == llama.vocab_size == 60 and plain.eod == llama.eod == 2
    assert llama.encode("the fox") == [1, *plain.encode("the fox")]
    # <CLS>, <SEP>, <EOD>, <MASK>, then <PAD>, which this model lacks; <s> and </s> are its own
    assert (megatron.vocab_size, megatron.eod) == (65, 62) and megatron.encode("the fox") == plain.encode("the fox")
    more = make("SentencePieceTokenizer", {**files["Llama2Tokenizer"], "vocab_extra_ids": 4})
    assert more.vocab_size == 69 and more.decode([68, 62, *plain.encode("the fox")]) == "the fox"


def test_words_between_blanks(files):
    tokenizer = make("WhitespaceTokenizer", files["WhitespaceTokenizer"])
    assert tokenizer.encode(" the cat\tfox\n<|endoftext|>") == [2, 0, 7, 0] and tokenizer.eod == 1
    assert tokenizer.vocab_size == 8 and tokenizer.decode([2, 7, 5]) == "the fox <unk>"


def test_the_end_of_a_tokenizer_json(files, tmp_path):
    content = Path(files["HuggingFaceTokenizer"]["tokenizer_model"]).read_text()
    (tmp_path / "tokenizer.json").write_text(content)
    tokenizer = make("HuggingFaceTokenizer", {"tokenizer_model": str(tmp_path)})
    assert tokenizer.eod == 1
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<s>"}}')
    assert make("HuggingFaceTokenizer", {"tokenizer_model": str(tmp_path)}).eod == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    with pytest.raises(ConfigError, match=r"no token called <stop>.*eos_token"):
        make("HuggingFaceTokenizer", {"tokenizer_model": str(tmp_path)})


def test_prompts_begin_as_in_transformers_and_texts_end_with_any_end_of_the_model(files, tmp_path):
    """The post-processor of tokenizer.json puts <s> before a text, unless tokenizer_config.json says what to add."""
    content = json.loads(Path(files["HuggingFaceTokenizer"]["tokenizer_model"]).read_text())
    begin = {"id": "<s>", "ids": [0], "tokens": ["<s>"]}
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": begin},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))

    def prompt(settings):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"bos_token": "<s>", "eos_token": "</s>", **settings})
        )
        tokenizer = make("HuggingFaceTokenizer", {"tokenizer_model": str(tmp_path)})
        ids = tokenizer.encode_prompt("the fox <s>")
        assert tokenizer.encode("the fox <s>") == [i for i in ids if i not in (0, 1)], "only a prompt has more tokens"
        return ids[0] == 0, ids[-1] == 1

    assert prompt({}) == (True, False)
    assert prompt({"add_bos_token": False, "add_eos_token": False}) == (False, False)
    assert prompt({"add_bos_token": True, "add_eos_token": True}) == (True, True)
    tokenizer = make("HuggingFaceTokenizer", {"tokenizer_model": str(tmp_path)})
    assert (tokenizer.begin, tokenizer.ends) == (0, {1})
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    assert make("HuggingFaceTokenizer", {"tokenizer_model": str(tmp_path)}).ends == {1, 5}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4, -1, 2305843009213693951]}')
    assert make("HuggingFaceTokenizer", {"tokenizer_model": str(tmp_path)}).ends == {1, 3, 4}
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config.json is not a JSON object"):
        make("HuggingFaceTokenizer", {"tokenizer_model": str(tmp_path)})


def test_a_fingerprint_is_of_the_content_and_not_of_the_place(files, bpe_files, tmp_path):
    prints = {make(kind, options).fingerprint for kind, options in files.items()}
    assert len(prints) == len(files)
    for name, path in zip(("v", "m"), bpe_files):
        (tmp_path / name).write_bytes(Path(path).read_bytes())
    moved = GPT2BPETokenizer(str(tmp_path / "v"), str(tmp_path / "m"))
    assert moved.fingerprint == GPT2BPETokenizer(*bpe_files).fingerprint
    (tmp_path / "m").write_text("".join(Path(bpe_files[1]).read_text().splitlines(keepends=True)[:-1]))
    assert GPT2BPETokenizer(str(tmp_path / "v"), str(tmp_path / "m")).fingerprint != moved.fingerprint


JUNK = [b"", b"\x80\x04\x95", b"{", b"\xff\xfe", b'{"a": -1}', b'{"<unk>": 0, "<|endoftext|>": 0}', b"[" * 100000]


@pytest.mark.parametrize("kind", [k for k in KINDS if KINDS[k].needs not in ((), ("vocab_size",))])
def test_files_that_are_no_vocabulary_are_refused(kind, tmp_path):
    path = tmp_path / "file"
    options = {name: str(path) for name in KINDS[kind].needs}
    with pytest.raises(ConfigError, match="does not exist"):
        make(kind, options)
    with pytest.raises(ConfigError, match="needs --"):
        make(kind, {})
    for junk in JUNK:
        path.write_bytes(junk)
        with pytest.raises(ConfigError) as caught:
            make(kind, options)
        assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_vocabulary_of_words_needs_its_two_special_words(tmp_path):
    (tmp_path / "v.json").write_text('{"<unk>": 0}')
    with pytest.raises(ConfigError, match=r"no <\|endoftext\|>"):
        WhitespaceTokenizer(str(tmp_path / "v.json"))


TEXTS = st.text(st.sampled_from("theunafblcsTHEéÉ字 .[]#\t\n\u200d\ufffd0"), max_size=40)


@pytest.fixture(scope="module")
def reference(files):
    """transformers' own BERT tokenizers in plain Python, lower-casing and not."""
    module = pytest.importorskip("transformers.models.bert.tokenization_bert_legacy")
    path = files["BertWordPieceCase"]["vocab_file"]
    return {lower: module.BertTokenizerLegacy(path, do_lower_case=lower) for lower in (True, False)}


@pytest.mark.slow
@given(text=TEXTS)
def test_word_pieces_are_those_of_the_reference(files, reference, text):
    for lower, kind in ((True, "BertWordPieceLowerCase"), (False, "BertWordPieceCase")):
        expected = reference[lower].convert_tokens_to_ids(reference[lower].tokenize(text, split_special_tokens=True))
        assert make(kind, files[kind]).encode(text) == expected


PLAIN = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "</s>": 2, "<unk>": 3}, "unk_token": "<unk>"},
}


def a_tokenizer_json(folder, **parts):
    (folder / "tokenizer.json").write_text(json.dumps({**PLAIN, **parts}))
    return build_tokenizer(Config(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(folder)))


def test_a_tokenizer_json_that_makes_its_library_panic_is_an_error(tmp_path):
    """Rust's panics are no Exceptions."""
    assert a_tokenizer_json(tmp_path).decode([0]) == "a"
    with pytest.raises(ConfigError, match=r"is not a tokenizer.json: Precompiled: .*Cannot parse"):
        a_tokenizer_json(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    lengths = a_tokenizer_json(tmp_path, pre_tokenizer={"type": "FixedLength", "length": 0})
    with pytest.raises(InvalidText, match="cannot encode this text: chunk size must be non-zero"):
        lengths.encode("a b")
    strip = a_tokenizer_json(tmp_path, decoder={"type": "Strip", "content": "a", "start": 9, "stop": 9})
    with pytest.raises(ConfigError, match="cannot decode ids: index out of bounds"):
        strip.decode([0, 1])
    unknown = {"type": "BPE", "vocab": {"a": 0, "</s>": 2}, "merges": [], "unk_token": "zz"}
    with pytest.raises(InvalidText, match="cannot encode this text: Unk token"):
        a_tokenizer_json(tmp_path, model=unknown).encode("a b")


def replacements(count, content, pattern):
    return [{"type": "Replace", "pattern": pattern, "content": content}] * count


def charsmap(replacement):
    """A table of SentencePiece whose trie is empty."""
    content = struct.pack("<I", 1024) + bytes(1024) + replacement.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


@pytest.mark.parametrize(
    "steps",
    [
        replacements(10, "aaaaaaaa", {"Regex": "."}),
        replacements(6, "aaaa", {"String": ""}),
        replacements(14, "aa", {"String": "a"}),
        [{"type": "Prepend", "prepend": "a" * 9000}],
        [{"type": "NFKC"}, *replacements(1, "\ufdfa", {"String": " "})] * 3,
        [{"type": "ByteLevel"}] * 9,
        [charsmap("a" * 9000)],
    ],
)
def test_a_tokenizer_json_that_multiplies_a_text_is_refused(steps, tmp_path):
    """Such a file can take any amount of memory, and its library ends the process when there is no more."""
    with pytest.raises(ConfigError, match=r"can make a text .* times as long; at most"):
        a_tokenizer_json(tmp_path, normalizer={"type": "Sequence", "normalizers": steps})


def test_a_tokenizer_json_that_multiplies_a_token_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="its decoder can make a token 81 times as long; at most 64"):
        chain = replacements(4, "aaa", {"String": "a"})
        a_tokenizer_json(tmp_path, decoder={"type": "Sequence", "decoders": chain})
    with pytest.raises(ConfigError, match="a token has 65537 characters"):
        words = {"a" * 65537: 0, "</s>": 1, "<unk>": 2}
        a_tokenizer_json(tmp_path, model={"type": "WordLevel", "vocab": words, "unk_token": "<unk>"})


def test_the_steps_of_common_tokenizers_are_accepted(tmp_path):
    albert = [
        *replacements(1, '"', {"String": "``"}),
        *replacements(1, '"', {"String": "''"}),
        {"type": "NFKD"},
        {"type": "StripAccents"},
        {"type": "Lowercase"},
        charsmap("x" * 33),
        *replacements(1, " ", {"Regex": " {2,}"}),
    ]
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    words = {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, metaspace]}
    assert a_tokenizer_json(tmp_path, normalizer={"type": "Sequence", "normalizers": albert}, pre_tokenizer=words)
    llama = [{"type": "Prepend", "prepend": "\u2581"}, *replacements(1, "\u2581", {"String": " "})]
    back = [*replacements(1, " ", {"String": "\u2581"}), {"type": "ByteFallback"}, {"type": "Fuse"}]
    assert a_tokenizer_json(
        tmp_path,
        normalizer={"type": "Sequence", "normalizers": llama},
        decoder={"type": "Sequence", "decoders": back},
    )


@pytest.mark.parametrize("largest", [1 << 24, 2**33, 2**62, 10**400])
def test_a_vocabulary_with_a_huge_id_is_refused(largest, tmp_path):
    """The embedding has a row for every id up to the largest."""
    (tmp_path / "words.json").write_text(json.dumps({"<unk>": 0, "<|endoftext|>": 1, "a": largest}))
    with pytest.raises(ConfigError, match="at most 16777216 are supported"):
        build_tokenizer(Config(tokenizer_type="WhitespaceTokenizer", vocab_file=str(tmp_path / "words.json")))
    with pytest.raises(ConfigError, match="at most 16777216 are supported"):
        build_tokenizer(Config(tokenizer_type="NullTokenizer", vocab_size=largest))


def test_what_is_shown_of_bytes_has_no_replacement_characters():
    """A character may be cut off at either end, and a model of bytes may generate anything in between."""
    ids = list("é".encode())[1:] + list(b"a\xff") + list("ü".encode()) + [256] + list("ß".encode())[:1]
    assert ByteTokenizer().display(ids) == "\\xa9a\\xffü\\xc3"
    assert "\ufffd" in ByteTokenizer().decode(ids)
