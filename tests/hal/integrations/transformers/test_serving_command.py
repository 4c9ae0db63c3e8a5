"""`python -m hal.integrations.transformers serve`: OpenAI's client talks to a model that HAL trained and exported."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from model_options import LLAMA_OPTIONS

from hal.cli.convert import main as convert_command
from hal.cli.generate import main as generate_command
from hal.model.apps.convert import hal_format
from hal.model.apps.convert.hf_tokenizer import PLAIN_CHAT
from hal.model.apps.convert.weights import Weights
from hal.model.config.schema import Config
from hal.model.gpt.model import GPT, OUTPUT_LAYER

for package in ("transformers", "fastapi", "uvicorn", "openai", "safetensors", "accelerate"):
    pytest.importorskip(package, reason=f"needs {package} (extras: serve, test)")

COMMAND = [sys.executable, "-m", "hal.integrations.transformers"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A HAL checkpoint of a random model of bytes that prefers letters, so that its text is readable."""
    options: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 128,
        "init_method_std": 0.3,
        **LLAMA_OPTIONS,
        "hidden_dropout": 0.0,
        "untie_embeddings_and_output_weights": True,
    }
    config = Config(**options, make_vocab_size_divisible_by=1)
    config.set_vocabulary(257)
    torch.manual_seed(0)
    tensors = {name: p.detach() for name, p in GPT(config, torch.device("cpu")).named_parameters()}
    letters = torch.zeros(257, 1)
    letters[ord("a") : ord("z") + 1] = 1.0
    tensors[OUTPUT_LAYER] = tensors[OUTPUT_LAYER] * letters
    hal_format.write(Weights(options, tensors, {"tokenizer_type": "ByteTokenizer"}), tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def greedy(checkpoint: Path, prompt: str, count: int, out: Path) -> str:
    """The text of `hal generate`."""
    import json

    arguments = ["--backend", "cpu_ref", "--load", str(checkpoint), "--greedy", "--prompt", prompt]
    assert generate_command([*arguments, "--num-tokens-to-generate", str(count), "--output-file", str(out)]) == 0
    return str(json.loads(out.read_text())["text"])


def page_commands(names: dict[str, Any]) -> list[str]:
    """The export, the server and the client of docs/serve.md, with other names in place of those of the page."""
    page = (Path(__file__).parents[4] / "docs" / "serve.md").read_text()
    blocks = re.findall(r"^```(?:bash|python)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    found = [block for block in blocks if re.search(r"hal convert|transformers serve|import openai", block)]
    assert len(found) == 3, "the page has an export, a server and a client"
    result = []
    for block in found:
        for theirs, ours in names.items():
            block = block.replace(theirs, str(ours))
        result.append("\n".join(line for line in block.splitlines() if not line.startswith("pip ")))
    return result


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_openais_client_chats_completes_streams_and_stops(checkpoint: Path, tmp_path: Path, cpu_ref: Any) -> None:
    import openai

    exported, port, log = tmp_path / "exported", free_port(), tmp_path / "server.log"
    (tmp_path / "chat.jinja").write_text(PLAIN_CHAT)
    names = {"run/checkpoints": checkpoint, "run/exported": exported, "chat.jinja": tmp_path / "chat.jinja"}
    export, serve, client_code = page_commands({**names, "8000": port})
    hal_name, convert_name, *arguments = shlex.split(export)
    assert (hal_name, convert_name) == ("hal", "convert") and convert_command(arguments) == 0
    text = greedy(checkpoint, "import ", 16, tmp_path / "completion.jsonl")
    reply = greedy(checkpoint, "user: hi\nassistant:", 10, tmp_path / "chat.jsonl")
    assert len(text) == 16 and text.isalpha() and len(set(text)) > 4

    offline, python_name, *arguments = shlex.split(serve)
    assert (offline, python_name, arguments[:2]) == ("HF_HUB_OFFLINE=1", "python", COMMAND[1:])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        server = subprocess.Popen([sys.executable, *arguments], stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        while "Uvicorn running" not in log.read_text():
            assert server.poll() is None, log.read_text()
            time.sleep(0.2)
        client = openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=0)
        ask = {"model": str(exported), "prompt": "import ", "max_tokens": 16, "temperature": 0}
        talk: dict[str, Any] = {
            "model": str(exported),
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 10,
            "temperature": 0,
        }
        assert client.completions.create(**ask).choices[0].text == text
        parts = [e.choices[0].text for e in client.completions.create(**ask, stream=True) if e.choices]
        assert "".join(filter(None, parts)) == text and len(parts) > 3
        answer = client.chat.completions.create(**talk).choices[0]
        assert answer.message.content == reply and answer.finish_reason == "length"
        deltas = [e.choices[0].delta.content for e in client.chat.completions.create(**talk, stream=True) if e.choices]
        assert "".join(filter(None, deltas)) == reply
        stopped = client.completions.create(**ask, stop=[text[5:7]]).choices[0]
        # The page's program prints a text, the same in pieces, and an answer.
        page = subprocess.run([sys.executable, "-c", client_code], capture_output=True, text=True, check=True)
        longer = greedy(checkpoint, "import ", 20, tmp_path / "longer.jsonl")
        assert page.stdout.startswith(f"{longer}\n{longer}")
        assert stopped.finish_reason == "stop" and text.startswith(stopped.text) and len(stopped.text) <= 7
    finally:
        server.terminate()
        server.wait(60)
    said = log.read_text()
    assert re.search(r"replaced +1 attention implementation by hal.ops.flash_attention", said), said
    assert re.search(r"replaced +5 LlamaRMSNorm by", said), said


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["serve", "x"], "no backend was chosen; give --backend"),
        (["serve", "x", "--backend", "nothing"], "no backend is called 'nothing'"),
        (["serve", "x", "--backend", "cpu_ref", "--attn-implementation", "sdpa"], "would be ignored"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], reason: str, monkeypatch: Any) -> None:
    from hal.integrations.transformers.__main__ import main

    monkeypatch.delenv("HAL_BACKEND", raising=False)
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert reason in str(end.value.code) and "\n" not in str(end.value.code)
