"""hal info."""

import sys

import torch

import hal


def test_it_lists_every_backend_with_its_source_facts_and_versions(run):
    code, out, _ = run("info")
    assert code == 0
    assert (
        "healthy (in-tree): 1 device\n  one imaginary device\n  driver: 12.3\n  kind: one\n  tensors: bfloat16, bool"
        in out
    )
    assert "elements of a tensor: limited by memory\n  asynchronous: no, compiles per shape: no" in out
    assert "memory pools: no, dropout in attention: yes\n  2 implementations of 1 op" in out
    assert "absent (in-tree): cannot run here\n  no such card in this machine" in out
    assert f"torch-hal         {hal.__version__}" in out
    assert f"torch             {torch.__version__.split('+')[0]}" in out


def test_a_broken_backend_is_shown_and_hides_no_other(run):
    code, out, _ = run("info")
    assert code == 0
    assert "broken (in-tree): broken\n  PluginError: the backend 'broken'" in out
    assert "healthy (in-tree)" in out


def test_one_backend_can_be_named_and_simulated(run):
    _, out, _ = run("info", "--backend", "absent", "--simulate")
    assert "absent (in-tree, simulated): 1 device" in out
    assert "healthy" not in out


def test_wrong_usage_is_one_line(run):
    for argv, text in [
        (("info", "--backend", "cpu_rf"), "Did you mean 'cpu_ref'?"),
        (("info", "--simulate"), "--simulate needs --backend NAME"),
        (("info", "--bckend", "x"), "unrecognized arguments: --bckend x"),
        (("info", "--backend", "broken"), "cannot be imported: ModuleNotFoundError"),
    ]:
        code, _, err = run(*argv)
        assert code == 2
        assert text in err
        assert err.count("\n") == 1


def test_it_imports_no_vendor_package(run):
    before = {"cupy", "torch_npu"} & set(sys.modules)
    run("info")
    assert {"cupy", "torch_npu"} & set(sys.modules) == before
