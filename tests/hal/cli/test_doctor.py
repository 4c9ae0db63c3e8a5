"""hal doctor."""

import pytest

import hal
from hal.cli.doctor import account

SIMPLE = [op for op in hal.OPS.values() if op.decompose is None]


def line(out, subject):
    return next(text for text in out.splitlines() if text.split()[1:2] == [subject])


def test_a_healthy_backend_passes_and_shows_what_it_lacks(run):
    code, out, _ = run("doctor", "--backend", "healthy")
    assert code == 0
    assert line(out, "device").split() == ["PASS", "device", "cpu"]
    assert line(out, "rms_norm").split() == ["ran", "rms_norm", "healthy/fast,", "one", "call", "in", "float32"]
    done, _, listed, _ = line(out, "torch").split()[2:]
    assert done == listed and int(listed) > 40
    assert "none    adamw                 no implementation" in out
    lacks = "composed of other ops, of which the backend lacks linear, cross_entropy"
    assert f"parts   linear_cross_entropy  {lacks}" in out
    assert len(out.splitlines()) >= 3 + len(hal.OPS)


def test_a_wrong_result_fails_with_the_error_and_the_command_that_shows_it(run):
    code, out, _ = run("doctor", "--backend", "wrong")
    assert code == 1
    assert "FAIL    l2norm                wrong/squared: the output: error of" in out
    assert "what would help: hal parity --backend wrong --op l2norm shows the call" in out


def test_a_refusal_is_a_reason(run):
    _, out, _ = run("doctor", "--backend", "wrong")
    assert "refused swiglu                wrong/shy: it is Friday" in out
    assert "what would help: hal why swiglu --backend wrong" in out


@pytest.mark.parametrize(
    "argv, text",
    [
        (("healthy",), f"hal parity --backend healthy --todo lists the {len(SIMPLE) - 1} missing ops"),
        (("wrong",), "hal parity --backend wrong --op l2norm shows the call; then hal doctor --backend wrong again"),
        (("absent",), "install what is named above, or without the device: hal doctor --backend absent --simulate"),
        (("absent", "--simulate"), "hal parity --backend absent --simulate --todo"),
        (("broken",), "install, update or uninstall the package that the message names; then hal doctor"),
        (("uncompiled",), "hal info --backend uncompiled shows what is installed; then hal doctor"),
    ],
)
def test_each_backend_ends_with_the_next_thing_to_do(run, argv, text):
    _, out, _ = run("doctor", "--backend", *argv)
    last = out.splitlines()[-1]
    assert last.startswith("  next: ")
    assert text in last


def test_a_complete_and_healthy_backend_is_ready_to_train(run):
    out = run("doctor", "--backend", "cpu_ref")[1]
    assert out.splitlines()[-1].endswith("runs the whole conformance kit; hal train --backend cpu_ref trains")


def test_a_backend_that_cannot_run_here_is_a_reason_and_not_a_crash(run):
    code, out, _ = run("doctor", "--backend", "absent")
    assert code == 1
    assert line(out, "probe").endswith("no such card in this machine")
    assert "hal doctor --backend absent --simulate" in out
    assert run("doctor", "--backend", "absent", "--simulate")[0] == 0
    code, out, _ = run("doctor", "--backend", "uncompiled")
    assert code == 1
    assert "BackendUnavailable: no compiler; install one with: apt install gcc" in out
    code, out, _ = run("doctor", "--backend", "broken")
    assert code == 1
    assert "No module named 'no_such_module'" in out


def test_without_a_name_every_backend_is_examined_and_none_fails_the_command(run, monkeypatch):
    here = {n: v for n, v in hal.core.registry.IN_TREE.items() if "imaginary" in v or n == "broken"}
    monkeypatch.setattr(hal.core.registry, "IN_TREE", here)
    code, out, _ = run("doctor")
    assert code == 0
    assert all(f"{name} (in-tree)" in out for name in ("healthy", "wrong", "absent", "uncompiled", "broken"))


@pytest.mark.parametrize("user, umask, words", [(1000, 0o027, []), (0, 0o077, ["root"]), (1000, 0o022, ["umask 022"])])
def test_root_and_an_open_umask_are_named(user, umask, words):
    lines = list(account(user, umask))
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines))


def test_wrong_usage(run):
    code, _, err = run("doctor", "--backend", "helthy")
    assert code == 2
    assert "Did you mean 'healthy'?" in err
