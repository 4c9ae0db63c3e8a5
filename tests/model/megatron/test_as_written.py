"""Programs that say "cuda" run as they are under `hal launch`: the sources' notebook, and Megatron-LM's own scripts."""

import functools
import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
from megatron_lm import CHECKOUT, TRAINER, needs_checkout
from sentencepiece import SentencePieceTrainer
from test_scripts import OPTIONS, losses

pytestmark = pytest.mark.nightly
BACKENDS = {"cpu_ref": (), "npu": ("--simulate",), "cuda": ("--simulate",)}
INSTALLED = [name for name in BACKENDS if name != "npu" or find_spec("torch_npu") is not None]


def command(backend, ranks, script, folder, *arguments):
    """Arguments of subprocess that launch a script in `folder`, with logs in its folder `logs`."""
    words = [sys.executable, "-m", "hal", "launch", "--backend", backend, *BACKENDS[backend]]
    words += ["--nproc-per-node", str(ranks), "--log-dir", "logs", str(script), *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment["PYTHONPATH"] = os.environ.get("MEGATRON_LM", "")
    # The notebook waits for as many processes as there are devices.
    environment["ASCEND_RT_VISIBLE_DEVICES"] = ",".join(map(str, range(ranks)))
    return {"args": words, "cwd": folder, "env": environment}


def run(backend, ranks, script, folder, *arguments):
    """What all ranks of a script print that ends by itself, without an error."""
    if backend == "npu" and find_spec("torch_npu") is None:
        pytest.skip("torch_npu is not installed (extra: npu)")
    result = subprocess.run(
        **command(backend, ranks, script, folder, *arguments), capture_output=True, text=True, timeout=580
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return "".join(log.read_text() for log in sorted((folder / "logs").rglob("*.log")))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_cells_of_the_notebook(backend, tmp_path):
    output = run(backend, 4, Path(__file__).with_name("notebook_cells.py"), tmp_path)
    losses = [float(x) for x in re.findall(r"Losses reduced :\[\{'lm loss': tensor\(([\d.]+)", output)]
    assert output.count("Broadcast assertion passed") == 1 and output.count("gathered") == 4
    assert len(losses) == 20 and output.count("Successfully loaded the model") == 4


WORDS = "the a small large network device layer reads writes adds keeps sends gradient loss batch token"
TINY = (
    "--hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 4 --lr 0.001 --min-lr 1e-5 --lr-warmup-fraction .01 --split 60,20,20 --log-interval 1 "
    "--eval-interval 100 --eval-iters 1 --transformer-impl local --use-cpu-initialization --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--attention-dropout 0 --hidden-dropout 0 --num-workers 0 --legacy-tokenizer "
    "--tokenizer-type BertWordPieceLowerCase --data-path data_text_sentence --vocab-file vocab.txt"
)
OTHERS = {
    "bert": "--num-layers 2 --seq-length 64 --spec local",
    "t5": "--encoder-num-layers 2 --decoder-num-layers 2 --encoder-seq-length 64 --decoder-seq-length 32 "
    "--vocab-extra-ids 100",
}


def documents(folder):
    """Writes documents of sentences in a BERT vocabulary, as a dataset of pretrain_bert.py and pretrain_t5.py."""
    draw, vocabulary = random.Random(5), WORDS.split()
    sentences = [" ".join(draw.choices(vocabulary, k=draw.randint(5, 12))) + "." for _ in range(480)]
    texts = [" ".join(sentences[start : start + 12]) for start in range(0, 480, 12)]
    (folder / "text.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *vocabulary, "."]) + "\n"
    )
    words = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", "vocab.txt", "--split-sentences"]
    command = ["data", "preprocess", "--input", "text.json", "--output-prefix", "data", *words]
    subprocess.run([sys.executable, "-m", "hal", *command], cwd=folder, check=True, capture_output=True)


@functools.cache
def losses_of(model, backend, ranks):
    """The losses of four iterations of pretrain_bert.py or pretrain_t5.py."""
    with tempfile.TemporaryDirectory() as name:
        documents(Path(name))
        options = f"{TINY} {OTHERS[model]} --tensor-model-parallel-size {ranks}"
        options += f" --make-vocab-size-divisible-by {128 // ranks}"
        output = run(backend, ranks, CHECKOUT / f"pretrain_{model}.py", Path(name), *options.split())
    return [float(loss) for loss in re.findall(r"lm loss: ([\d.E+-]+)", output)]


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    """A folder with a model that counts in letters, trained by pretrain_gpt.py, and the options that load it."""
    folder = tmp_path_factory.mktemp("counting")
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    # The vocabulary is ordered by frequency.
    texts = (" ".join(letters[: n + 1]) for n in range(len(letters)))
    with open(folder / "letters.model", "wb") as file:
        SentencePieceTrainer.train(
            sentence_iterator=texts, model_writer=file, model_type="word", vocab_size=3 + len(letters), minloglevel=2
        )
    options = f"{OPTIONS} --legacy-tokenizer --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model letters.model"
    options = f"{options} --train-iters 12".split()
    run("cpu_ref", 1, CHECKOUT / "pretrain_gpt.py", folder, *options, "--save", "saved", "--save-interval", 12)
    return SimpleNamespace(folder=folder, options=[*options, "--load", "saved", "--inference-max-seq-length", 32])


def answer(request, process):
    """The JSON that a server answers, once it listens."""
    while process.poll() is None:
        try:
            with urlopen(request, timeout=60) as response:
                return json.load(response)
        except URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
            time.sleep(0.5)
    raise AssertionError(f"the server ended with exit code {process.returncode}")


class TestMegatronsScripts:
    pytestmark = needs_checkout(*TRAINER)

    @pytest.mark.parametrize("model", OTHERS)
    @pytest.mark.parametrize("backend, ranks", [("cpu_ref", 2), ("cuda", 1), ("npu", 1)])
    def test_bert_and_t5_train_alike_on_every_backend(self, model, backend, ranks):
        one = losses_of(model, "cpu_ref", 1)
        assert len(one) == 4 and one[0] == pytest.approx(math.log(128), rel=0.15), "of 128 padded ids"
        assert losses_of(model, backend, ranks) == pytest.approx(one, abs=2e-4)

    def test_preprocessing_gives_the_files_of_hal(self, tmp_path):
        documents(tmp_path)
        options = ["--input", "text.json", "--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", "vocab.txt"]
        tool = [CHECKOUT / "tools" / "preprocess_data.py", "--legacy-tokenizer", "--workers", 1]
        for command, prefix in ((tool, "theirs"), (["-m", "hal", "data", "preprocess"], "ours")):
            words = map(str, [sys.executable, *command, *options, "--output-prefix", prefix, "--append-eod"])
            subprocess.run([*words], cwd=tmp_path, check=True, capture_output=True)
        for suffix in ("bin", "idx"):
            files = [tmp_path / f"{prefix}_text_document.{suffix}" for prefix in ("theirs", "ours")]
            assert files[0].read_bytes() == files[1].read_bytes()

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_the_simple_training_loop(self, backend, tmp_path):
        output = run(backend, 2, CHECKOUT / "examples" / "run_simple_mcore_train_loop.py", tmp_path)
        losses = re.findall(r"Iteration \d: Losses reduced: \[\{'lm loss': tensor\(([\d.]+)", output)
        if backend == "npu":  # the script draws the weights on the host and seeds only the device's generator
            assert [float(loss) for loss in losses] == pytest.approx([math.log(100)] * 10, abs=0.03)
        else:
            assert sorted(losses) == sorted(2 * ["4.6045", "4.6045", "4.6083", "4.6042", "4.6061"])

    def test_pretraining_has_the_same_losses_on_every_backend(self):
        expected = losses(1)
        for backend in INSTALLED[1:]:
            assert losses(1, backend=f"{backend} --simulate") == pytest.approx(expected, abs=2e-5)

    def test_a_trained_model_generates_on_every_backend(self, counting):
        """Mock data count upwards, and so does what a model generates that was trained on them."""
        asked = ["--prompts", "a b c", "k l", "--num-tokens-to-generate", 4, "--top_k", 1, "--output-path", "out.json"]
        script = CHECKOUT / "examples" / "inference" / "gpt" / "gpt_static_inference.py"
        for backend, ranks in [(backend, 1) for backend in INSTALLED] + [("cpu_ref", 2)]:
            parallel = ["--tensor-model-parallel-size", ranks, "--make-vocab-size-divisible-by", 128 // ranks]
            run(backend, ranks, script, counting.folder, *counting.options, *parallel, *asked)
            answers = json.loads((counting.folder / "out.json").read_text())
            assert [answers[key]["generated_text"].split() for key in "01"] == [
                ["d", "e", "f", "g"],
                ["m", "n", "o", "p"],
            ]
            (counting.folder / "out.json").unlink()

    def test_it_is_served(self, counting):
        pytest.importorskip("flask_restful")
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        script = CHECKOUT / "tools" / "run_text_generation_server.py"
        options = [*counting.options, "--port", port, "--inference-max-batch-size", 2]
        process = subprocess.Popen(**command("cpu_ref", 1, script, counting.folder, *options))
        try:
            body = json.dumps({"prompts": ["a b c"], "tokens_to_generate": 4, "top_k": 1}).encode()
            request = Request(f"http://127.0.0.1:{port}/api", body, {"Content-Type": "application/json"}, method="PUT")
            assert answer(request, process)["text"] == ["a b c d e f g"]
        finally:
            process.terminate()
            process.wait(60)

    def test_what_needs_an_nvidia_device_says_so(self, counting):
        dynamic = CHECKOUT / "examples" / "inference" / "gpt" / "gpt_dynamic_inference.py"
        with pytest.raises(AssertionError, match="dynamic batching computes attention over its paged cache"):
            run("cpu_ref", 1, dynamic, counting.folder, *counting.options, "--prompts", "a b c")
        converter = CHECKOUT / "tools" / "checkpoint" / "convert.py"
        words = "--model-type GPT --loader core --saver core --load-dir saved --save-dir new"
        with pytest.raises(AssertionError, match="needs Transformer Engine"):
            run("cpu_ref", 1, converter, counting.folder, *words.split())

    @pytest.mark.parametrize(
        "more",
        ["", "--moe-token-dispatcher-type alltoall", "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --bf16"],
    )
    def test_experts(self, more, tmp_path):
        options = ["--num-experts", 4, "--moe-router-topk", 2, "--disable-bias-linear", *more.split()]
        result = losses(1, *options)
        # Processors sum bfloat16 products in different orders, which the choices of experts amplify.
        tolerance = 2e-2 if "--bf16" in more else 2e-6
        assert result[:4] == pytest.approx([4.885973, 4.801611, 4.545811, 4.323309], abs=tolerance)
