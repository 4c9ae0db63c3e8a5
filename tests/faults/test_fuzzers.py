"""Every parser of outside input, on random and mutated inputs: a value or a HalError of one line, nothing else.

HAL_FUZZ_EXAMPLES is the number of inputs per parser: 1000 by default, 100,000 in the nightly run. An example of
hypothesis is a batch of inputs that are cut from one string of bytes: generating each of them on its own took longer
than most parsers do. A failure carries its input as a note.
"""

import contextlib
import gzip
import io
import itertools
import json
import os
import pickle
import tempfile
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from hostile_pickles import HOSTILE_STATES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece_messages import NORMALIZER, REPLACED, charsmap, field

from hal import HalError
from hal.launch.hosts import parse_hostfile, select
from hal.model.apps.convert import safetensors_files
from hal.model.apps.evaluation.tasks import _text as task_text
from hal.model.apps.html_report.record import read_runs
from hal.model.checkpoint import reader
from hal.model.checkpoint.safe_unpickle import stored_tensors
from hal.model.checkpoint.torch_archive import load_state
from hal.model.checkpoint.writer import save
from hal.model.config.command_line import parse, read_config
from hal.model.config.formats import strict_yaml
from hal.model.config.schema import Config, ConfigError
from hal.model.data.gpt_dataset import parse_blend
from hal.model.data.indexed_dataset import read_index
from hal.model.data.megatron_datasets import indexed_dataset
from hal.model.data.preprocess.encode import Encoder, Encoding
from hal.model.data.preprocess.sources import Raw, Reader
from hal.model.data.tokenizers.build import build_tokenizer
from hal.model.data.tokenizers.tokenizer import InvalidText
from hal.model.inference.text_generation import read_prompts
from hal.model.training.run_log import RunLog
from hal.testing.support import read as read_rows
from hal.testing.verification import read_call
from hal.untrusted import parse_integer, parse_json

EXAMPLES = int(os.environ.get("HAL_FUZZ_EXAMPLES", "1000"))


def an_archive(content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a/data.pkl", content)
    return file.getvalue()


def a_state():
    file = io.BytesIO()
    torch.save({"a": torch.arange(6.0), "b": [1, "x", (2, None)], "c": {"d": torch.ones(2, 2)}}, file)
    return file.getvalue()


def an_index(folder):
    builder = indexed_dataset().IndexedDatasetBuilder(f"{folder / 'seed'}.bin", dtype=numpy.uint16)
    builder.add_document(numpy.arange(20, dtype=numpy.uint16), [12, 8])
    builder.finalize(f"{folder / 'seed'}.idx")
    (folder / "d.bin").write_bytes(bytes(40))
    return (folder / "seed.idx").read_bytes()


def a_checkpoint(folder):
    root = folder / "seed"
    return save(root, 1, {"a": torch.arange(6.0)}, {"iteration": 1, "config": {}}), root


def metadata(folder, content):
    where, _ = a_checkpoint(folder) if not (folder / "seed").exists() else (folder / "seed" / "iter_0000001", None)
    (where / ".metadata").write_bytes(content)
    stored_tensors(where)


def manifest(folder, content):
    where, _ = a_checkpoint(folder) if not (folder / "seed").exists() else (folder / "seed" / "iter_0000001", None)
    (where / reader.MANIFEST).write_bytes(content)
    reader.read_state(folder / "seed")


def file_of(name, read):
    def run(folder, content):
        (folder / name).write_bytes(content)
        read(folder / name)

    return run


def dataset(folder, content):
    (folder / "d.idx").write_bytes(content)
    read_index(folder / "d")


def text_of(read):
    return lambda folder, content: read(content.decode("utf-8", "replace"))


def tokenizer(kind, option):
    def run(folder, content):
        (folder / "file").write_bytes(content)
        built = build_tokenizer(Config(tokenizer_type=kind, **{option: str(folder / "file")}))
        with contextlib.suppress(InvalidText):
            built.decode(built.encode("a text")[:4])

    return run


def byte_pair_files(folder):
    contents = b'{"<|endoftext|>": 0, "a": 1, "b": 2, "ab": 3}', b"#version: 0.2\na b\n"
    for name, content in zip(("vocab.json", "merges.txt"), contents, strict=True):
        (folder / name).write_bytes(content)
    return contents


def byte_pairs(name):
    def run(folder, content):
        (folder / name).write_bytes(content)
        files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
        built = build_tokenizer(Config(tokenizer_type="GPT2BPETokenizer", **files))
        with contextlib.suppress(InvalidText):
            built.decode(built.encode("a text")[:4])

    return run


def sentence_pieces(folder):
    from sentencepiece import SentencePieceTrainer

    written = io.BytesIO()
    lines = iter([f"the cat {n} sat on the mat" for n in range(50)])
    SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=written,
        vocab_size=24,
        minloglevel=2,
        normalization_rule_name="identity",  # the other tables have 240 kB, which no input would change much
    )
    return written.getvalue() + field(NORMALIZER, charsmap(REPLACED))


def saved_call(folder):
    torch.save(
        {
            "op": "rms_norm",
            "implementation": "cpu_ref/c",
            "arguments": {"x": torch.ones(2, 3), "weight": torch.ones(3), "eps": 1e-5},
            "requires_grad": ["x"],
            "upstream": [torch.ones(2, 3)],
        },
        folder / "seed.pt",
    )
    return (folder / "seed.pt").read_bytes()


def config(folder, content):
    (folder / "c.yaml").write_bytes(content)
    reading = read_config(str(folder / "c.yaml"))
    if reading.problems:
        raise reading.problems[0]


def compressed(folder, content):
    (folder / "d.jsonl.gz").write_bytes(content)
    for _ in Reader(folder / "d.jsonl.gz", "json", "file"):
        pass


def documents(folder, content):
    (folder / "d.jsonl").write_bytes(content)
    tokenizer = {"tokenizer_type": "ByteTokenizer"}
    encode = Encoder(Encoding(tokenizer, ("text",), None, keep_newlines=False, append_eod=True))
    raws = [raw for raw in Reader(folder / "d.jsonl", "json", "file") if isinstance(raw, Raw)]
    broken = encode(raws).broken
    assert all("\n" not in b.reason and len(b.reason) < 3000 for b in broken)


def hugging_face(name):
    def run(folder, content):
        (folder / name).write_bytes(content)
        (safetensors_files.read_config if name == "config.json" else safetensors_files.read_tensors)(folder)
        (folder / name).unlink()

    return run


def run_record(folder, content):
    (folder / "run.json").write_bytes(content)
    log = object.__new__(RunLog)
    log.folder = folder
    log._continue(5)


def safetensors_file():
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    return len(header).to_bytes(8, "little") + header + bytes(8)


DEEP = b"[" * 100_000
PLAIN = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8A"},
    "pre_tokenizer": {"type": "FixedLength", "length": 3},
    "decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 1},
    "model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 2, "<unk>": 3}, "unk_token": "<unk>"},
}
WORDS = b'{"<unk>": 0, "<|endoftext|>": 1, "a": 2}'

PARSERS = {
    "index of a checkpoint": (metadata, lambda f: [(a_checkpoint(f)[0] / ".metadata").read_bytes()]),
    "manifest": (manifest, lambda f: [(a_checkpoint(f)[0] / reader.MANIFEST).read_bytes()]),
    "torch.save": (
        file_of("a.pt", load_state),
        lambda f: [a_state(), *(an_archive(c) for c, _ in HOSTILE_STATES.values() if len(c) < 9999), pickle.dumps(1)],
    ),
    "tracker": (
        file_of(reader.LATEST, lambda path: reader.tracked(path.parent)),
        lambda f: [b"100\n", b"release", b"9" * 40],
    ),
    "indexed dataset": (dataset, lambda f: [an_index(f)]),
    "hostfile": (text_of(parse_hostfile), lambda f: [b"a slots=2\nb slots=4 # more\n"]),
    "filter": (text_of(lambda t: select(parse_hostfile("a slots=2\nb slots=4"), t)), lambda f: [b"a@b:0,2", b"b:1"]),
    "options": (
        # A request for help ends the process.
        text_of(lambda t: parse(["--backend", "cpu_ref", *(w for w in t.split() if w not in ("-h", "--help"))])),
        lambda f: [b"--lr 1e-3 --num-layers 2 --seed 5 --split 9,1,0 --pre-tokens 4"],
    ),
    "yaml": (
        file_of("a.yaml", lambda path: strict_yaml.load(path, "it")),
        lambda f: [b"a: 1\nb: [1, 2]\nc: {d: 1e-3}\n"],
    ),
    "blend": (text_of(lambda t: parse_blend(tuple(t.split()), "--data-path")), lambda f: [b"0.3 a 0.7 b", b"a b c"]),
    "words": (tokenizer("WhitespaceTokenizer", "vocab_file"), lambda f: [WORDS]),
    "word pieces": (tokenizer("BertWordPieceCase", "vocab_file"), lambda f: [b"[UNK]\na\n##b\ntext\n"]),
    "tokenizer.json": (tokenizer("HuggingFaceTokenizer", "tokenizer_model"), lambda f: [json.dumps(PLAIN).encode()]),
    "words of GPT-2": (byte_pairs("vocab.json"), lambda f: [byte_pair_files(f)[0]]),
    "merges of GPT-2": (byte_pairs("merges.txt"), lambda f: [byte_pair_files(f)[1]]),
    "SentencePiece": (tokenizer("GPTSentencePieceTokenizer", "tokenizer_model"), lambda f: [sentence_pieces(f)]),
    "compressed documents": (compressed, lambda f: [gzip.compress(b'{"text": "a"}\n{"text": "b"}\n', mtime=0)]),
    "saved call": (file_of("call.pt", read_call), lambda f: [saved_call(f)]),
    "configuration of MindSpeed": (
        config,
        lambda f: [
            b"training_config: {seed: 1}\nmodel_config: {num_layers: 2, num_layer_list: '[1, 1]'}\n"
            b"parallel_config: {pipeline_model_parallel_size: 2}\n",
            b"model_config: {num_layers: 2, num_layer_list: '" + DEEP[:5000] + b"'}\n",
        ],
    ),
    "configuration of MindFormers": (
        config,
        lambda f: [
            b"runner_config: {epochs: 1, batch_size: 2}\nmodel: {model_config: {hidden_size: 8, num_layers: 1}}\n",
            b"parallel: {data_parallel: 1}\nmodel_config: {llm: {num_layers: 2}}\n",
        ],
    ),
    "options in YAML": (config, lambda f: [b"num_layers: 2\nlr: 1e-3\nsplit: [9, 1, 0]\n"]),
    "documents": (documents, lambda f: [b'{"text": "a"}\n{"text": "b", "c": [1, {}]}\n', DEEP]),
    "config.json": (hugging_face("config.json"), lambda f: [b'{"model_type": "llama", "hidden_size": 8}', DEEP]),
    "safetensors": (hugging_face("model.safetensors"), lambda f: [safetensors_file()]),
    "index of safetensors": (
        hugging_face("model.safetensors.index.json"),
        lambda f: [b'{"weight_map": {"a": "b.safetensors"}}', DEEP],
    ),
    "evaluated texts": (text_of(lambda t: task_text(t, "line 1")), lambda f: [b'{"text": "a"}', DEEP]),
    "record of a run": (
        run_record,
        lambda f: [b'{"losses": [[1, 2.0], [7, 1.0]], "grad_norms": [[1, 1.0]], "evaluations": []}', DEEP],
    ),
    "records to report": (
        file_of("run.json", lambda path: read_runs([path.parent])),
        lambda f: [b'{"losses": [[1, 2.0]], "grad_norms": [[1, 1.0]], "config": {}, "tokens_per_second": 1.0}', DEEP],
    ),
    "rows of parity": (
        file_of("p.json", read_rows),
        lambda f: [
            b'[{"op": "a", "dtype": "b", "backend": "c", "simulated": false, "status": "pass", "samples": 1,'
            b' "worst_error_in_tolerances": "x", "reasons": []}]',
            DEEP,
        ],
    ),
    "prompts": (file_of("a.jsonl", read_prompts), lambda f: [b'{"prompt": "a"}\n{"text": "b"}\n']),
    "integer": (text_of(lambda t: parse_integer(t, -5, 10**18, "it")), lambda f: [b"12", b"-3", b"9" * 30]),
    "json": (text_of(lambda t: parse_json(t, "it")), lambda f: [b'{"a": [1, 2.5e3, null, "x"]}', b"[" * 3000]),
}


BATCH = 64
"""Inputs of an example."""
ENTROPY = 1536
"""Bytes from which an example's inputs are made: an input takes about 20, and they are used again if they do not
suffice."""


def batch(seeds, noise, entropy):
    """BATCH inputs: seeds, or `noise`, with up to 5 places replaced, removed, repeated or inserted; zeros change
    nothing."""
    stream = itertools.cycle(entropy)

    def number(below):
        return (next(stream) << 8 | next(stream)) % below

    sources = [*seeds, noise]
    for _ in range(BATCH):
        content = bytearray(sources[next(stream) % len(sources)])
        for _ in range(next(stream) % 6):
            at = number(len(content) + 1)
            kind, length, count = next(stream) % 3, next(stream) % 9, next(stream) % 21
            new = bytes(next(stream) for _ in range(length)) if kind else bytes(content[at : at + length]) * count
            content[at : at + (length if kind == 1 else 0)] = new
        yield bytes(content)


@pytest.fixture
def folder(tmp_path):
    """A folder in memory, if there is one: on a disk, writing the inputs takes ten times as long as reading them."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else tmp_path) as made:
        yield Path(made)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PARSERS)
def test_a_parser_returns_or_refuses_in_one_line(name, folder, monkeypatch):
    monkeypatch.setenv("HAL_CACHE_DIR", str(folder / "cache"))
    read, seeds = PARSERS[name]

    known = seeds(folder)

    def check(content):
        try:
            read(folder, content)
        except HalError as error:
            # The problems of a command line are reported together, a line each.
            texts = [problem.text for problem in error.problems] if isinstance(error, ConfigError) else [str(error)]
            assert all("\n" not in text and len(text) < 3000 for text in texts)
        except OSError as error:
            assert error.strerror

    @settings(
        max_examples=-(-EXAMPLES // BATCH), derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(noise=st.binary(max_size=60), entropy=st.binary(min_size=ENTROPY, max_size=ENTROPY))
    def check_batch(noise, entropy):
        for content in batch(known, noise, entropy):
            try:
                check(content)
            except BaseException as error:
                error.add_note(f"the input is {content!r}")
                raise

    check_batch()
