"""hal parity: its output, files and exit codes. The checks themselves are tested in tests/hal/testing."""

import json

import pytest

from hal.testing.production import check


def test_a_pass(run, tmp_path):
    path = tmp_path / "rows.json"
    argv = ("parity", "--backend", "healthy", "--op", "rms_norm", "--max-examples", "3")
    code, out, _ = run(*argv, "--json", str(path))
    assert code == 0
    assert out.count("pass     rms_norm") == 7  # two implementations in three dtypes, and the lowered op
    rows = json.loads(path.read_text())
    first = next(r for r in rows if r["op"] == "rms_norm")
    assert {
        "op": "rms_norm",
        "dtype": "float32",
        "backend": "healthy",
        "simulated": False,
        "status": "pass",
        "reasons": first["reasons"],
        "implementation": "healthy/fast",
    }.items() <= first.items()
    assert first["samples"] > 3
    assert 0 <= first["worst_error_in_tolerances"] < 1
    assert "3 dimensions (the kernel has 2)" in first["reasons"]
    assert {r["status"] for r in rows} == {"pass"}


def test_a_failure_shows_its_code_and_exits_1(run, tmp_path):
    path = tmp_path / "rows.json"
    code, out, _ = run("parity", "--backend", "wrong", "--op", "l2norm", "--max-examples", "3", "--json", str(path))
    assert code == 1
    assert "FAIL     l2norm" in out
    assert "        hal.use('wrong', simulate=False)" in out
    assert "replay(ops.l2norm, sample, torch.float32, implementation='wrong/squared')" in out
    rows = json.loads(path.read_text())
    assert {r["status"] for r in rows if r["implementation"] == "wrong/squared"} == {"fail"}


def test_simulated_rows_say_so(run, tmp_path):
    path = tmp_path / "rows.json"
    argv = ("--op", "rms_norm", "--max-examples", "0", "--simulate", "--json", str(path))
    code, out, _ = run("parity", "--backend", "absent", *argv)
    assert code == 0
    assert "absent (simulated):" in out
    assert {r["simulated"] for r in json.loads(path.read_text())} == {True}


def test_missing_ops_are_listed_and_fail_only_if_asked(run):
    argv = ("parity", "--backend", "healthy", "--op", "rms_norm", "--op", "adamw", "--max-examples", "0")
    code, out, _ = run(*argv)
    assert code == 0
    assert "no implementation of: adamw" in out
    assert run(*argv, "--require-all")[0] == 1


def test_a_probe_that_is_not_pure_fails(run):
    code, out, _ = run("parity", "--backend", "moody", "--op", "rms_norm", "--max-examples", "0")
    assert code == 1
    assert "probe of backend 'moody' is not pure" in out


def test_ops_that_nobody_implements_decline_the_golden_loss(run):
    code, out, _ = run("parity", "--backend", "healthy", "--op", "golden_loss")
    assert code == 0
    assert "declined golden_loss" in out
    assert "embedding on backend 'healthy': no implementation is registered" in out


@pytest.mark.parametrize(
    "argv, text",
    [
        ((), "no backend was chosen"),
        (("--backend", "healty"), "Did you mean 'healthy'?"),
        (("--backend", "healthy", "--op", "relu"), "no op is called 'relu'; ops: "),
        (("--backend", "healthy", "--max-examples", "-1"), "--max-examples must be 0 or more, got -1"),
        (("--backend", "absent"), "backend 'absent' cannot run here: no such card in this machine"),
        (
            ("--backend", "healthy", "--op", "rms_norm", "--max-examples", "0", "--json", "/no/such/dir/f"),
            "/no/such/dir",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(run, argv, text):
    code, _, err = run("parity", *argv)
    assert code == 2
    assert text in err
    assert err.strip().count("\n") == 0


def test_production_sizes(run):
    argv = ("--op", "rms_norm", "--dtype", "float32", "--scale", "production")
    code, out, _ = run("parity", "--backend", "absent", "--simulate", *argv)
    assert code == 0 and "pass     rms_norm" in out and "   3 calls" in out


def test_a_call_that_was_not_run_fails_only_if_asked(run, monkeypatch):
    monkeypatch.setattr(check, "_host_memory", lambda: 1000)
    argv = ("parity", "--backend", "absent", "--simulate", "--op", "rms_norm", "--scale", "production")
    argv += ("--dtype", "float32")
    code, out, _ = run(*argv)
    assert (
        code == 0 and "not run  rms_norm" in out and "hidden 4096: needs about 0.0 GB of memory, 0.0 GB are free" in out
    )
    assert run(*argv, "--require-all")[0] == 1


def test_production_sizes_are_about_the_ops_of_one_backend(run):
    code, _, err = run("parity", "--backend", "absent", "--collectives", "--scale", "production")
    assert code == 2 and "--scale production is about the ops of one --backend" in err


def test_one_dtype(run):
    argv = ("parity", "--backend", "healthy", "--op", "rms_norm", "--max-examples", "0")
    code, out, _ = run(*argv, "--dtype", "bfloat16")
    assert code == 0 and out.count("rms_norm            bfloat16") == 2 and "float32" not in out
    code, out, _ = run(*argv, "--dtype", "bfloat16", "--dtype", "float32")
    assert code == 0 and out.count("rms_norm            float32") == 3  # the lowered op, too


def test_an_unknown_dtype_is_refused(run):
    code, _, err = run("parity", "--backend", "healthy", "--dtype", "int3")
    assert code != 0 and "--dtype int3: the kit runs bfloat16, float16, float32, float64" in err


@pytest.mark.parametrize("extra", [("--max-examples", "3"), ("--op", "golden_loss")])
def test_options_that_production_sizes_lack_are_refused(run, extra):
    code, _, err = run("parity", "--backend", "healthy", "--scale", "production", *extra)
    assert code == 2 and "--scale production has no random calls and no golden losses" in err
