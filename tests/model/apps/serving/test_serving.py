"""The endpoint: OpenAI's own client works, answers equal those of `hal generate`, and requests cannot exceed the
limits."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_options import byte_model

from hal import HalError
from hal.model.config.schema import Config
from hal.model.data.tokenizers.tokenizer import ByteTokenizer
from hal.model.gpt.model import GPT
from hal.model.inference.engine import Engine
from hal.model.inference.load import Pretrained
from hal.model.inference.sampling import Sampling
from hal.model.inference.text_generation import Request, answer

uvicorn = pytest.importorskip("uvicorn", reason="needs uvicorn (extra: serve)")
pytest.importorskip("fastapi", reason="needs fastapi (extra: serve)")

from hal.model.apps.serving import worker as worker_module  # noqa: E402
from hal.model.apps.serving.app import Limits, build_app  # noqa: E402
from hal.model.apps.serving.connections import server_config  # noqa: E402
from hal.model.apps.serving.protocol import BadRequest, Completion, parse  # noqa: E402
from hal.model.apps.serving.worker import Worker  # noqa: E402

BYTES, LENGTH = ByteTokenizer(), 48


@pytest.fixture
def model(cpu_ref):
    return byte_model(LENGTH)


@pytest.fixture
def serve(model):
    """Starts a server in this process and returns its port. Stops all servers at the end."""
    running = []

    def start(*, waiting=4, limits=Limits(), api_key=None, loopback=True):
        app = build_app(Worker(model, waiting), "tiny", limits, api_key=api_key, loopback=loopback)
        server = uvicorn.Server(server_config(app, host="127.0.0.1", port=0, seconds=limits.seconds, connections=200))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        running.append((server, thread))
        return server.servers[0].sockets[0].getsockname()[1]

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def post(port, body, *, path="/v1/completions", headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    content = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
    connection.request("POST" if content is not None else "GET", path, content, headers or {})
    response = connection.getresponse()
    text = response.read()
    connection.close()
    return response.status, json.loads(text) if text[:1] == b"{" else text.decode()


def test_openais_client_works(serve, model):
    openai = pytest.importorskip("openai", reason="needs openai's client (extra: test)")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{serve()}/v1", api_key="none", max_retries=0)
    assert [m.id for m in client.models.list()] == ["tiny"]
    options = {"model": "tiny", "max_tokens": 12, "seed": 5, "temperature": 0.9, "top_p": 0.95}
    completion = client.completions.create(prompt=["to be", "or"], n=2, logprobs=1, **options)
    prompts = [list(b"to be"), list(b"or")]
    request = Request(12, Sampling(0.9, 0, 0.95), seed=5, samples=2)
    want = [one for samples in answer(model.engine, BYTES, prompts, request, batch=8) for one in samples]
    assert [c.text for c in completion.choices] == [one.text for one in want]
    assert [c.finish_reason for c in completion.choices] == [one.reason for one in want]
    assert [c.index for c in completion.choices] == [0, 1, 2, 3]
    assert completion.usage.prompt_tokens == 7 and completion.usage.completion_tokens == sum(one.tokens for one in want)
    logprobs = completion.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == want[0].tokens
    assert all(max(top.values()) >= own for top, own in zip(logprobs.top_logprobs, logprobs.token_logprobs))
    events = list(
        client.completions.create(prompt="to be", stream=True, stream_options={"include_usage": True}, **options)
    )
    assert "".join(e.choices[0].text for e in events[:-1]) == completion.choices[0].text
    assert [e.choices[0].finish_reason for e in events[:-1]][-1] == want[0].reason and len(events) > 5
    assert events[-1].choices == [] and events[-1].usage.completion_tokens == want[0].tokens
    with pytest.raises(openai.BadRequestError, match="logit_bias is not supported"):
        client.completions.create(prompt="x", logit_bias={"3": 1.0}, **options)
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
        client.completions.create(prompt="x", **{**options, "model": "gpt-4"})


def test_stop_texts_echo_and_ids(serve):
    port = serve()
    body = {"prompt": "to be", "max_tokens": 12, "seed": 5, "temperature": 0.0}
    _, free = post(port, body)
    text = free["choices"][0]["text"]
    _, again = post(port, {**body, "prompt": list(b"to be"), "echo": True, "stop": None, "user": "someone"})
    assert again["choices"][0]["text"] == "to be" + text
    at = next(i for i in range(2, len(text)) if text[i] not in text[:i])
    _, stopped = post(port, {**body, "stop": ["never", text[at]]})
    assert stopped["choices"][0] == {"text": text[:at], "index": 0, "logprobs": None, "finish_reason": "stop"}
    # Without a seed, two answers differ.
    free = {"prompt": "", "max_tokens": 20, "temperature": 1.5}
    assert post(port, free)[1]["choices"] != post(port, free)[1]["choices"]


REFUSED = [
    (b"", 400, "not valid JSON"),
    (b"\xff\xfe", 400, "not valid JSON"),
    (b"[" * 100_000, 400, "not valid JSON"),
    ([1], 400, "the body"),
    ({"promt": "x"}, 400, "promt: Extra inputs"),
    ({"prompt": {"a": 1}}, 400, "prompt"),
    ({"prompt": ["a", 1]}, 400, "prompt"),
    ({"prompt": [300]}, 400, "ids go from 0 to 256"),
    ({"prompt": [-1]}, 400, "ids go from 0 to 256"),
    ({"prompt": "\ud800"}, 400, "cannot encode|surrogates"),
    ({"prompt": "x" * LENGTH}, 400, "more than the model's context of 48"),
    ({"prompt": "x", "max_tokens": 10**12}, 400, "more than the model's context"),
    ({"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "x", "n": 9}, 400, "more than the 8"),
    ({"prompt": ["x"] * 1000}, 400, "more than the 8"),
    ({"prompt": "x", "temperature": "1"}, 400, "temperature"),
    (b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
    ({"prompt": "x", "top_p": 0.0}, 400, "top_p"),
    ({"prompt": "x", "logprobs": 6}, 400, "logprobs"),
    ({"prompt": "x", "logprobs": 1, "echo": True}, 400, "echo with logprobs"),
    ({"prompt": "x", "best_of": 3}, 400, "best_of is not supported"),
    ({"prompt": "x", "presence_penalty": 1.0}, 400, "presence_penalty is not supported"),
    ({"prompt": "x", "stop": ["a", ""]}, 400, "none of them empty"),
    ({"prompt": "x", "stop": list("abcde")}, 400, "at most 4"),
    ({"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"prompt": "x", "seed": -1}, 400, "seed"),
]


def test_what_is_wrong_or_not_supported_is_refused_by_name(serve):
    port = serve()
    for body, status, reason in REFUSED:
        got, answer = post(port, body)
        assert got == status and re.search(reason, answer["error"]["message"]), (body, answer)
        assert answer["error"]["type"] == "invalid_request_error"
    assert post(port, None, path="/v1/nothing")[0] == 404
    assert post(port, None, path="/docs")[0] == 404
    assert post(port, None, path="/health") == (200, {"status": "ok", "waiting": 0})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)


@settings(max_examples=80)
@given(st.dictionaries(st.sampled_from(sorted(Completion.model_fields)), JSON, max_size=4) | JSON | st.binary())
def test_any_body_is_a_request_or_a_bad_one(content):
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    try:
        request = parse(body)
        assert isinstance(request, Completion) and request.sampling and request.count >= 1 and request.samples >= 1
    except BadRequest as error:
        assert error.status == 400 and error.message


def test_bodies_are_bounded_in_size_and_time(serve):
    port = serve(limits=Limits(body=1000, seconds=0.5))
    assert post(port, b"x" * 1001)[0] == 413
    # The Content-Length is only claimed, or is missing.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", "/v1/completions", iter([b"y" * 600] * 3), encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", "500")
    connection.endheaders(b"only the beginning")
    response = connection.getresponse()
    assert response.status == 408 and b"did not arrive" in response.read()
    connection.close()


def test_only_names_of_this_machine_and_only_with_the_key(serve):
    port = serve(api_key="secret")
    for headers, status in (
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer secret"}, 200),
        ({"Authorization": "Bearer secret", "Host": "attacker.example"}, 400),
        ({"Authorization": "Bearer secret", "Host": f"localhost:{port}"}, 200),
    ):
        assert post(port, None, path="/v1/models", headers=headers)[0] == status
    assert post(port, {"prompt": "x"})[0] == 401


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_full_line_refuses_and_a_client_that_leaves_frees_it(serve, monkeypatch):
    started, jobs = threading.Event(), []

    def endless(model, job):
        jobs.append(job)
        started.set()
        assert job.cancelled.wait(15)

    monkeypatch.setattr(worker_module, "run", endless)
    port = serve(waiting=0)
    connections = []
    for stream in (False, True):  # one request runs, the other takes the only place in the queue
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        body = json.dumps({"prompt": "x", "stream": stream})
        connection.request("POST", "/v1/completions", body)
        connections.append(connection)
        assert started.wait(10)
        until(lambda n=len(connections): len(jobs) + post(port, None, path="/health")[1]["waiting"] == n)
    status, answer = post(port, {"prompt": "x"})
    assert status == 429 and "too many requests are waiting" in answer["error"]["message"]
    connections[0].close()
    until(lambda: jobs[0].cancelled.is_set() and len(jobs) == 2)
    assert post(port, None, path="/health")[1]["waiting"] == 0
    connections[1].close()
    until(lambda: jobs[1].cancelled.is_set())


def raw_post(port, body):
    """(status, headers, content) of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body).encode())
    response = connection.getresponse()
    content = json.loads(response.read())
    connection.close()
    return response.status, response.headers, content


@pytest.mark.slow
def test_a_hundred_parallel_clients_are_served_or_told_when_to_return(serve):
    port, results = serve(waiting=16), []

    def ask(number):
        results.append(raw_post(port, {"prompt": "a", "max_tokens": 8, "seed": number}))

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(100)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(120)
    served = [content for status, _, content in results if status == 200]
    refused = [(headers, content) for status, headers, content in results if status == 429]
    assert len(served) + len(refused) == 100
    assert len(served) >= 17  # the running one, and all that may wait
    assert all(content["choices"][0]["finish_reason"] for content in served)
    for headers, content in refused:
        assert int(headers["Retry-After"]) >= 1 and "try again later" in content["error"]["message"]
    assert post(port, {"prompt": "a", "max_tokens": 2})[0] == 200


def test_a_client_that_returns_as_told_is_served(serve):
    """No starvation: everyone who asks again gets an answer, while others keep the server busy."""
    port, answered = serve(waiting=1), []

    def ask():
        while raw_post(port, {"prompt": "a", "max_tokens": 2})[0] == 429:
            time.sleep(0.05)
        answered.append(True)

    clients = [threading.Thread(target=ask) for _ in range(12)]
    for client in clients:
        client.start()
    for client in clients:
        client.join(120)
    assert len(answered) == 12


def test_idle_connections_deny_nobody_and_are_closed(serve):
    port = serve(limits=Limits(seconds=1.0))
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
    for n, connection in enumerate(idle):
        connection.sendall(b"P"[: n % 2])
    assert post(port, {"prompt": "a", "max_tokens": 2})[0] == 200
    # A client that has been served once has no more time for the head of its next request.
    kept = socket.create_connection(("127.0.0.1", port))
    kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert kept.recv(4096).startswith(b"HTTP/1.1 200")
    kept.sendall(b"G")
    for connection in (*idle, kept):
        connection.settimeout(60)
        while connection.recv(4096):
            pass
        connection.close()


def test_an_address_has_a_limit_of_connections_and_of_requests(serve, monkeypatch):
    port = serve(waiting=4, limits=Limits(per_client=2))
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(201)]
    idle[-1].settimeout(60)
    with contextlib.suppress(ConnectionResetError):
        assert idle[-1].recv(1) == b""
    for connection in idle:
        connection.close()
    release, run = threading.Event(), worker_module.run
    monkeypatch.setattr(worker_module, "run", lambda model, job: (release.wait(60), run(model, job)))
    results = []
    waiting = [threading.Thread(target=lambda: results.append(raw_post(port, {"prompt": "a"})[0])) for _ in range(2)]
    for client in waiting:
        client.start()
    until(lambda: post(port, None, path="/health")[1]["waiting"] == 1)
    status, headers, content = raw_post(port, {"prompt": "a"})
    assert status == 429 and "2 requests of yours" in content["error"]["message"] and headers["Retry-After"]
    release.set()
    for client in waiting:
        client.join(60)
    assert results == [200, 200] and raw_post(port, {"prompt": "a"})[0] == 200


def test_a_model_that_fails_is_a_servers_error_and_the_next_request_works(serve, monkeypatch, capsys):
    whole = worker_module.run

    def fails(model, job):
        monkeypatch.setattr(worker_module, "run", whole)
        raise RuntimeError("a secret of the machine")

    monkeypatch.setattr(worker_module, "run", fails)
    port = serve()
    status, answer = post(port, {"prompt": "x"})
    assert status == 500 and answer["error"]["type"] == "server_error" and "secret" not in answer["error"]["message"]
    assert post(port, {"prompt": "x"})[0] == 200
    assert "a secret of the machine" in capsys.readouterr().err


def test_logits_that_are_no_numbers_are_this_requests_error(serve, model, capsys):
    port, weight = serve(), model.engine.model.decoder.final_layernorm.weight
    whole = weight.clone()
    weight.fill_(float("nan"))
    for more in ({}, {"temperature": 0.0}):
        status, answer = post(port, {"prompt": "x", **more})
        assert status == 500 and "the logits are not finite" in answer["error"]["message"]
    weight.copy_(whole)
    assert post(port, {"prompt": "x"})[0] == 200
    assert "Traceback" not in capsys.readouterr().err
    status, answer = post(port, {"prompt": "x", "temperature": 1e-320})
    assert (
        status == 400 and answer["error"]["param"] == "temperature" and "at least 0.0001" in answer["error"]["message"]
    )


def _serve_two(options):
    """Two ranks serve a failing and a working job. Returns how many tokens the second generated on each."""
    import hal
    from hal.mesh import Layout, Mesh
    from hal.model.apps.serving.worker import Job, follow

    hal.use("cpu_ref")
    mesh = Mesh(Layout(tp=2), hal.backend(), timeout=60.0)
    config = Config(**options)
    config.set_vocabulary(257)
    from hal.model.config.parallel_layout import make_parallel_layout

    engine = Engine.build(config, 257, mesh, make_parallel_layout(config, 2))
    model = Pretrained(config, engine, BYTES, 0, {})
    weight = engine.model.decoder.final_layernorm.weight
    whole = weight.clone()
    weight.fill_(float("nan"))
    messages = []
    stream = worker_module.stream

    def healed(*args, **more):  # the second job runs on an intact model, on both ranks
        try:
            yield from stream(*args, **more)
        finally:
            weight.copy_(whole)

    worker_module.stream = healed
    if mesh.rank:
        follow(model)
        return ["followed"]
    worker = Worker(model, 4)
    worker.start()
    for _ in range(2):
        worker.submit(Job([[1, 2]], 1, 3, Sampling(0.0), 0, (), 0, messages.append))
    worker.stop()
    return [type(x).__name__ for x in messages]


@pytest.mark.slow
def test_one_such_request_does_not_end_the_other_ranks():
    options = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": LENGTH}
    options |= {"tensor_model_parallel_size": 2}
    from hal.testing.processes import run_processes

    led, followed = run_processes(2, _serve_two, options)
    assert followed == ["followed"]
    assert led[0] == "NotFinite" and led[-1] == "NoneType" and "Piece" in led[1:-1]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["--nproc-per-node", "2", "--tensor-model-parallel-size", "2"]])
def test_the_command_serves_on_any_layout_until_it_is_told_to_end(layout, tmp_path, cpu_ref):
    from hal.model.apps.convert import hal_format
    from hal.model.apps.convert.weights import Weights

    options = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": LENGTH}
    config = Config(**options, init_method_std=0.3, make_vocab_size_divisible_by=1)
    config.set_vocabulary(257)
    tensors = {n: p.detach() for n, p in GPT(config, torch.device("cpu")).named_parameters()}
    hal_format.write(Weights(options, tensors, {"tokenizer_type": "ByteTokenizer"}), tmp_path / "tiny")
    command = [sys.executable, "-m", "hal", "serve", "--backend", "cpu_ref", "--load", str(tmp_path / "tiny")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--port", "0", *layout], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        line = process.stdout.readline()
        match = re.search(r"serving tiny at http://127\.0\.0\.1:(\d+)/v1", line)
        assert match, line
        answers = [post(int(match[1]), {"prompt": "to be", "seed": 1, "max_tokens": 9})[1] for _ in range(2)]
        assert answers[0]["choices"] == answers[1]["choices"] and answers[0]["usage"]["completion_tokens"] > 0
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            process.kill()
            process.stdout.close()
    if not layout:
        assert process.returncode == 0


def test_a_port_in_use_is_one_line():
    from hal.cli.serve import _bound

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(HalError, match=f"--port {port}: Address already in use; give another"):
            _bound("127.0.0.1", port)
    with pytest.raises(HalError, match=r"--host no\.such\.host\.invalid"):
        _bound("no.such.host.invalid", port)
