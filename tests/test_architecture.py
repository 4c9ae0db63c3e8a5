"""The directions of dependency, held by the syntax tree and by what is really imported.

model -> ops -> hal <- backends; the model names no device; backends use public names only; hal imports no vendor.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hal
from hal.testing.purity import Rule, backend_rule, check_tree, violations

ROOT = Path(hal.__file__).resolve().parent.parent

VENDORS = ("torch_npu", "cupy", "cffi", "torch.cuda", "torch.npu", "triton", "pyopencl")

DEVICE_FREE = Rule(forbidden=(*VENDORS, "hal.backends"), devices=True, dynamic=True)


def rule_of(name: str) -> Rule:
    return backend_rule(f"hal.backends.{name}")


BACKENDS = sorted(p.name for p in (ROOT / "backends").iterdir() if (p / "__init__.py").exists())


def report(found):
    assert not found, "\n" + "\n".join(map(str, found))


def test_the_model_names_no_device_and_no_backend():
    report(check_tree(ROOT / "model", DEVICE_FREE, package="hal.model"))


def test_ops_name_no_device_no_backend_and_no_model():
    rule = Rule(forbidden=(*DEVICE_FREE.forbidden, "hal.model"), devices=True, dynamic=True)
    report(check_tree(ROOT / "ops", rule, package="hal.ops"))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_uses_public_names_only(name):
    report(check_tree(ROOT / "backends" / name, rule_of(name), package=f"hal.backends.{name}"))


EXAMPLES = sorted(p.parent for p in (ROOT / "examples").glob("*/setup.cfg"))


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda p: p.name)
def test_an_example_backend_uses_public_names_only(folder):
    (package,) = [p.parent for p in folder.glob("*/__init__.py") if p.parent.name != "tests"]
    report(check_tree(package, backend_rule(package.name), package=package.name))


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda p: p.name)
def test_an_example_backend_says_for_which_contract_it_is_written(folder):
    """HAL refuses a plug-in that does not; the example's own tests run only where its driver is installed."""
    trees = [ast.parse(p.read_text()) for p in folder.glob("*/*.py") if p.parent.name != "tests"]
    classes = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    (backend,) = [c for c in classes if any(ast.unparse(base).endswith("Backend") for base in c.bases)]
    stated = {ast.unparse(n) for n in backend.body if isinstance(n, ast.Assign)}
    assert f"api = {hal.Backend.api}" in stated


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda p: p.name)
def test_an_example_backends_readme_counts_its_lines(folder):
    table = subprocess.run(
        [sys.executable, "-c", "import cost; print(cost.table())"],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
    ).stdout
    assert table.strip() in (folder / "README.md").read_text(), f"run: python {folder.name}/cost.py --write"


def test_the_contract_imports_no_vendor_no_op_and_no_model():
    rule = Rule(forbidden=("torch_npu", "cupy", "cffi", "triton", "hal.ops", "hal.model", "hal.backends"))
    found = []
    for path in sorted((ROOT / "hal").glob("*.py")):
        found += violations(path.read_text(), rule, package="hal", file=str(path))
    report(found)


def loaded_after(code):
    script = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    # A fresh process, away from the checkout, without the variables that would choose a backend.
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/")
    return set(result.stdout.split())


def test_importing_hal_loads_no_op_no_model_no_backend_and_no_vendor():
    loaded = loaded_after("import hal")
    below = {m for m in loaded if m.startswith(("hal.ops", "hal.model", "hal.backends", "hal.testing", "hal.cli"))}
    assert below == set()
    assert loaded.isdisjoint({"torch_npu", "cupy", "cffi", "hypothesis", "pytest", "megatron"})


def test_importing_the_ops_loads_no_backend_and_no_test_framework():
    loaded = loaded_after("import hal.ops")
    assert {m for m in loaded if m.startswith(("hal.backends", "hal.model"))} == set()
    assert loaded.isdisjoint({"torch_npu", "cupy", "cffi", "hypothesis", "pytest"})


@pytest.mark.parametrize(
    "module, absent",
    [
        ("hal.testing.kit", {"pytest"}),  # `hal parity` needs hypothesis only
        ("hal.testing.checks", {"pytest", "hypothesis"}),  # `hal doctor` needs neither
        ("hal.cli.doctor", {"pytest", "hypothesis", "hal.model"}),
        ("hal.cli.info", {"pytest", "hypothesis", "hal.ops", "hal.model"}),
        ("hal.testing.plugin", {"hypothesis", "hal.ops", "hal.model"}),  # loaded in every pytest session
    ],
)
def test_a_part_of_the_kit_needs_no_more_than_it_must(module, absent):
    assert loaded_after(f"import {module}").isdisjoint(absent)


PLANTED = [
    "import torch.cuda",
    "import torch.cuda as c",
    "import torch as t\nt.cuda.synchronize()",
    "from torch import cuda",
    "from torch import cuda as c",
    "from torch.cuda import synchronize as s",
    "from torch.cuda import *",
    "import torch\nmodule = torch\nmodule.cuda.empty_cache()",
    "import torch\ngetattr(torch, 'cuda').synchronize()",
    "import torch\ngetattr(torch, 'cu' + 'da')",
    "import importlib\nimportlib.import_module('torch_npu')",
    "from importlib import import_module as load\nload('torch' + '_npu')",
    "import importlib\nimportlib.import_module(input())",
    "__import__('cupy')",
    "import sys\nsys.modules['cffi']",
    "def f():\n    import torch_npu",
    "try:\n    import cupy\nexcept ImportError:\n    cupy = None",
    "if __debug__:\n    from cffi import FFI",
    "import hal.backends.cuda",
    "from hal import backends",
    "from hal.backends.cpu_ref import CpuRef",
    "from ..backends import cpu_ref",
    "from .. import backends",
    "import hal\nhal.backends.cuda",
    "x.to('cuda')",
    "x.to('npu:0')",
    "x.to(f'cuda:{rank}')",
    "x.to('cuda:' + '1')",
    "x.cuda()",
    "x.is_cuda",
    "device.type == 'npu'",
    "KINDS = {'cuda': 1}",
]


@pytest.mark.parametrize("source", PLANTED)
def test_the_model_rule_catches(source):
    assert violations(source, DEVICE_FREE, package="hal.model")


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nimport torch.distributed as dist\nfrom torch.nn.functional import relu",
        "import hal\nx = hal.device()\nhal.ops.linear(x, x)",
        "from .config import Config\nfrom . import checkpoint",
        "'''Runs on cuda, npu and cpu_ref.'''\nhelp = 'backend that runs the operations (cpu_ref, cuda, npu)'",
        "x.to('cpu')\nname = 'cuda_graph'\nx.device.type",
        "getattr(config, name)",
    ],
)
def test_the_model_rule_leaves_alone(source):
    assert violations(source, DEVICE_FREE, package="hal.model") == []


@pytest.mark.parametrize(
    "source",
    [
        "from hal.registry import load",
        "import hal\nhal.registry.load('x')",
        "import hal.dispatch",
        "from hal import dispatch",
        "import hal as h\nh.dispatch._active",
        "from ...hal.backend import make_call\nfrom hal.autograd import make_call",
        "from hal.backends.other import kernel",
        "from ..other import kernel",
        "from hal.ops.random import philox_bits",
        "from hal import ops\nops.random.philox_bits",
        "import importlib\nimportlib.import_module('hal.model.gpt')",
    ],
)
def test_the_backend_rule_catches(source):
    assert violations(source, rule_of("mine"), package="hal.backends.mine")


@pytest.mark.parametrize(
    "source",
    [
        "import hal\nhal.Backend, hal.require, hal.ops.linear, hal.ops.layouts.to_bnsd",
        "from hal import Backend, ops\nfrom . import kernels\nfrom .device import Mine",
        "import importlib\nimportlib.import_module(name)",
        "from hal.backends.mine.device import Mine",
    ],
)
def test_the_backend_rule_leaves_alone(source):
    assert violations(source, rule_of("mine"), package="hal.backends.mine") == []


def test_a_violation_shows_its_place():
    (found,) = violations("import torch\n\nx = torch.cuda.Stream\n", Rule(forbidden=("torch.cuda",)), file="m.py")
    assert str(found) == "m.py:3: refers to torch.cuda"
