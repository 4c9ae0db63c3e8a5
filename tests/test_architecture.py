"""The directions of dependency and the layout of the folders, checked in the syntax trees and by real imports.

model -> ops -> hal <- backends; the model names no device; backends use public names only; hal imports no vendor.
Inside hal/, model/ and benchmarks/ no file imports a folder that comes later in a fixed order, and there are no import
cycles anywhere. File names are unique within a tree, and tests/ mirrors the folders that it tests.
"""

import ast
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import import_graph
import pytest
from import_graph import Module

import hal
from hal.testing.purity import Rule, backend_rule, check_tree, violations

ROOT = Path(hal.__file__).resolve().parent.parent

VENDORS = ("torch_npu", "cupy", "cffi", "torch.cuda", "torch.npu", "triton", "pyopencl")

DEVICE_FREE = Rule(forbidden=(*VENDORS, "hal.backends"), devices=True, dynamic=True)


def rule_of(name: str) -> Rule:
    return backend_rule(f"hal.backends.{name}")


BACKENDS = sorted(p.name for p in (ROOT / "backends").iterdir() if (p / "__init__.py").exists())


def report(problems):
    assert not problems, "\n" + "\n".join(map(str, problems))


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


def test_the_backend_tools_name_no_device_no_backend_and_no_model():
    rule = Rule(forbidden=(*DEVICE_FREE.forbidden, "hal.model"), devices=True, dynamic=True)
    report(check_tree(ROOT / "hal" / "backend_tools", rule, package="hal.backend_tools"))


@pytest.mark.parametrize("folder", ["nn", "integrations"])
def test_layers_and_integrations_name_no_device_no_backend_and_no_model(folder):
    rule = Rule(forbidden=(*DEVICE_FREE.forbidden, "hal.model"), devices=True, dynamic=True)
    report(check_tree(ROOT / "hal" / folder, rule, package=f"hal.{folder}"))


def test_an_integration_is_made_of_short_files():
    """Each is an adapter: what takes more than this belongs in hal.nn, or in an op."""
    files = sorted((ROOT / "hal" / "integrations").glob("**/*.py"))
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in files}
    assert len(lines) > 5 and {name: n for name, n in lines.items() if n >= 150} == {}


def test_the_contract_imports_no_vendor_no_op_and_no_model():
    rule = Rule(
        forbidden=("torch_npu", "cupy", "cffi", "triton", "hal.ops", "hal.model", "hal.backends", "hal.backend_tools")
    )
    top, folders = sorted((ROOT / "hal").glob("*.py")), ("comm", "core")
    assert len(top) > 3
    report([v for path in top for v in violations(path.read_text(), rule, package="hal", file=str(path))])
    for folder in folders:
        report(check_tree(ROOT / "hal" / folder, rule, package=f"hal.{folder}"))


FRESH = """
import json, os, sys
import torch

loaded = {}
for module in sys.argv[1:]:
    read, write = os.pipe()
    if os.fork() == 0:  # with no more than torch imported
        __import__(module)
        files = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if n.isdigit() and
                 os.path.lexists(f"/proc/self/fd/{n}")]
        with os.fdopen(write, "w") as out:
            json.dump([*sorted(sys.modules), *(f"open {file}" for file in files if file.startswith("socket:"))], out)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        loaded[module] = json.loads(answer.read() or "[]")  # nothing after an error, which is on stderr
    os.wait()
print(json.dumps(loaded))
"""

BELOW_HAL = ("hal.ops", "hal.model", "hal.backends", "hal.testing", "hal.cli", "hal.nn", "hal.integrations")
ABSENT = {
    "hal": (*BELOW_HAL, "hal.core", "torch_npu", "cupy", "cffi", "hypothesis", "pytest", "megatron"),
    "hal.public": (*BELOW_HAL, "torch_npu", "cupy", "cffi", "hypothesis", "pytest", "megatron"),
    "hal.ops": ("hal.backends", "hal.model", "torch_npu", "cupy", "cffi", "hypothesis", "pytest"),
    "hal.nn": ("hal.backends", "hal.model", "hal.integrations", "transformers", "torch_npu", "cupy", "cffi", "pytest"),
    "hal.testing.kit": ("pytest",),  # `hal parity` needs hypothesis only
    "hal.testing.checks": ("pytest", "hypothesis"),  # `hal doctor` needs neither
    "hal.cli.doctor": ("pytest", "hypothesis", "hal.model"),
    "hal.cli.info": ("pytest", "hypothesis", "hal.ops", "hal.model"),
    "hal.testing.plugin": ("hypothesis", "hal.ops", "hal.model"),  # loaded in every pytest session
    "hal.model.training.trainer": ("torch._dynamo", "megatron", "matplotlib", "transformers"),
    "hal.model.gpt": tuple(f"hal.model.{part}" for part in ("training", "data", "checkpoint", "inference", "apps")),
}
"""Module -> what importing it must not load."""


@pytest.fixture(scope="module")
def loaded():
    """Module -> everything that importing it loads, in a process that had imported torch alone."""
    # Outside the checkout, and without the variables that select a backend.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HAL_")}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    command = [sys.executable, "-c", FRESH, *ABSENT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env=environment)
    return {module: set(names) for module, names in json.loads(done.stdout).items()}


def present(loaded, names):
    """Those of `names` that were loaded, or of which a part was."""
    return {name for name in names if any(m == name or m.startswith(name + ".") for m in loaded)}


@pytest.mark.parametrize("module", ABSENT)
def test_importing_a_module_loads_no_more_than_it_must(loaded, module):
    assert module in loaded[module]
    assert present(loaded[module], ABSENT[module]) == set()


def test_importing_opens_no_socket(loaded):
    assert [name for names in loaded.values() for name in names if name.startswith("open ")] == []


def test_what_is_loaded_is_noticed(loaded):
    assert present(loaded["hal.testing.kit"], ("pytest", "hypothesis", "hal.backends")) == {"hypothesis"}
    assert present(loaded["hal.model.gpt"], ("hal.ops", "hal.model.training")) == {"hal.ops"}


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
        "from hal.core.registry import load",
        "import hal\nhal.registry.load('x')",
        "import hal.core.dispatch",
        "from hal import dispatch",
        "import hal as h\nh.dispatch._active",
        "from ...hal.backend import make_call\nfrom hal.core.autograd import make_call",
        "from hal.backends.other import kernel",
        "from ..other import kernel",
        "from hal.ops.random import philox_bits",
        "from hal import ops\nops.random.philox_bits",
        "from hal.backend_tools.signatures import _adapted",
        "from hal.backend_tools import signatures",
        "from hal import backend_tools\nbackend_tools.compilation.announce",
        "import importlib\nimportlib.import_module('hal.model.gpt.model')",
    ],
)
def test_the_backend_rule_catches(source):
    assert violations(source, rule_of("mine"), package="hal.backends.mine")


@pytest.mark.parametrize(
    "source",
    [
        "import hal\nhal.Backend, hal.require, hal.ops.linear, hal.ops.layouts.to_bnsd",
        "from hal import Backend, ops\nfrom . import kernels\nfrom .device import Mine",
        "from hal.backend_tools import with_signature_of\nfrom hal import backend_tools\nbackend_tools.rows_of",
        "import importlib\nimportlib.import_module(name)",
        "from hal.backends.mine.device import Mine",
    ],
)
def test_the_backend_rule_leaves_alone(source):
    assert violations(source, rule_of("mine"), package="hal.backends.mine") == []


def test_a_violation_shows_its_place():
    (violation,) = violations("import torch\n\nx = torch.cuda.Stream\n", Rule(forbidden=("torch.cuda",)), file="m.py")
    assert str(violation) == "m.py:3: refers to torch.cuda"


MODEL_ORDER = (
    "__init__",
    "common",
    "config",
    "parallel",
    "gpt",
    "data",
    "checkpoint",
    "inference",
    "training",
    "megatron",
    "apps",
)
"""The folders and files in model/: none imports one that comes later."""

HAL_ORDER = (
    "autoload",
    "errors",
    "untrusted",
    "rng",
    "spans",
    "comm",
    "core",
    "public",
    "__init__",
    "backend_tools",
    "profiling",
    "nn",
    "integrations",
    "mesh",
    "launch",
    "pages",
    "testing",
    "cli",
    "__main__",
)
"""Likewise in hal/. What comes before `public` defines the public names of hal; what comes after __init__ uses them."""

BENCH_ORDER = ("__init__", "harness", "peers", "parallel", "suites", "gpu", "npu")
"""Likewise in benchmarks/."""

TREES = {
    "hal": ROOT / "hal",
    "hal.ops": ROOT / "ops",
    "hal.model": ROOT / "model",
    "hal.bench": ROOT / "benchmarks",
    **{f"hal.backends.{name}": ROOT / "backends" / name for name in BACKENDS},
}


BETWEEN_TREES = {
    "hal.ops": {"hal"},
    "hal.backend_tools": {"hal.ops"},
    # The operations of attention follow from its layouts.
    "hal.profiling": {"hal.ops"},
    "hal.nn": {"hal.ops"},
    "hal.integrations": {"hal.ops"},
    # It runs Megatron's scripts, with what hal.model.megatron changes in them.
    "hal.launch": {"hal.model"},
    # Its golden losses are those of the GPT.
    "hal.testing": {"hal.ops", "hal.model"},
    # hal.launch starts the processes of --nproc-per-node; --verify-ops compares calls like the kit.
    "hal.model": {
        "hal",
        "hal.ops",
        "hal.mesh",
        "hal.nn",
        "hal.untrusted",
        "hal.launch",
        "hal.pages",
        "hal.profiling",
        "hal.spans",
        "hal.testing",
    },
    # Dispatch is measured into a kernel of cpu_ref, and `make gpu` and `make npu` ask their backends before they run.
    "hal.bench": {
        *("hal", "hal.ops", "hal.model", "hal.core", "hal.errors", "hal.backend_tools", "hal.pages", "hal.profiling"),
        *("hal.testing", "hal.integrations"),
        *("hal.backends.cpu_ref", "hal.backends.cuda", "hal.backends.npu"),
    },
    "hal.cli": {"hal.ops", "hal.model", "hal.bench"},
    **{f"hal.backends.{name}": {"hal", "hal.ops", "hal.backend_tools"} for name in BACKENDS},
}
"""Tree, or folder of hal/ -> what it imports of other trees."""


def part_of(module):
    """The tree that a module belongs to; within hal/, its folder or file."""
    tree = tree_of(module)
    return ".".join(module.split(".")[:2]) if tree == "hal" else tree


def crossing(edges, allowed):
    """The imports from one tree to another that `allowed` does not name."""
    return sorted(
        f"{module} imports {target}"
        for module, targets in edges.items()
        for target in targets
        if tree_of(module) != tree_of(target) and part_of(target) not in allowed.get(part_of(module), ())
    )


def tree_of(module):
    """The name in TREES of the tree that a module belongs to."""
    return max((name for name in TREES if module == name or module.startswith(name + ".")), key=len)


@pytest.fixture(scope="module")
def edges():
    """Module -> the modules that it imports, in all trees together."""
    modules = {}
    for name, root in TREES.items():
        modules |= import_graph.modules(root, name)
    return import_graph.graph(modules)


@pytest.mark.parametrize("package, order", [("hal.model", MODEL_ORDER), ("hal", HAL_ORDER), ("hal.bench", BENCH_ORDER)])
def test_no_file_imports_a_folder_that_comes_later(edges, package, order):
    own = {module: targets for module, targets in edges.items() if tree_of(module) == package}
    assert len(own) > 30
    report(import_graph.against(order, own, package))


def test_no_tree_imports_another_that_it_must_not(edges):
    assert crossing(edges, BETWEEN_TREES) == []
    used = {(part_of(a), part_of(b)) for a, targets in edges.items() for b in targets if tree_of(a) != tree_of(b)}
    assert {(a, b) for a, targets in BETWEEN_TREES.items() for b in targets} == used, "no permission without a use"


def test_a_planted_import_of_another_tree_is_found():
    edges = {"hal.ops.norm": ["hal", "hal.model.gpt.model"], "hal.core.op": ["hal.errors", "hal.ops.norm"]}
    assert crossing(edges, BETWEEN_TREES) == [
        "hal.core.op imports hal.ops.norm",
        "hal.ops.norm imports hal.model.gpt.model",
    ]


def test_no_files_import_each_other_in_a_ring(edges):
    assert {tree_of(module) for module in edges} == set(TREES), "the graph contains every tree"
    assert import_graph.cycle(edges) == []


def planted(**sources):
    """The imports within a package p; x__y stands for the file y in its folder x, init for an __init__."""
    modules = {}
    for name, source in sources.items():
        module = f"p.{name.replace('__', '.')}".removesuffix(".init")
        modules[module] = Module(source, module if name.endswith("init") else module.rpartition(".")[0])
    return import_graph.graph(modules)


@pytest.mark.parametrize(
    "sources",
    [
        {"a": "from .b import x", "b": "from p.a import y"},
        {"a": "from . import b", "b": "import p.c", "c": "def f():\n    from .a import y"},
        {"a": "from .b import x", "b": "try:\n    from .a import y\nfinally:\n    pass"},
        {"a": "from .b import x", "b": "import importlib\nimportlib.import_module('p.a')"},
        {"a": "from .b import x", "b": "if TYPE_CHECKING:\n    pass\nelse:\n    from .a import y"},
        {"init": "from .t.a import x", "t__a": "from .. import x"},
    ],
)
def test_a_planted_ring_is_found(sources):
    ring = import_graph.cycle(planted(**sources))
    assert len(set(ring)) == len(sources) and ring[0] == ring[-1]


@pytest.mark.parametrize(
    "sources",
    [
        {"a": "from .b import x", "b": "from .c import y", "c": "import torch"},
        {"a": "from .b import x", "b": "if TYPE_CHECKING:\n    from .a import y"},
        {"a": "from .b import x", "b": "import typing\nif typing.TYPE_CHECKING:\n    from .a import y"},
        {"a": "from .b import x", "b": "'''See p.a.'''\nfrom q import a"},
        {"a": "from .b import x", "b": "import importlib\nimportlib.import_module(f'p.{name}')"},
    ],
)
def test_where_there_is_no_ring_none_is_found(sources):
    assert import_graph.cycle(planted(**sources)) == []


@pytest.mark.parametrize("source", ["from ..b.x import f", "def f():\n    import p.b.x", "from .. import b"])
def test_a_planted_import_of_a_later_folder_is_found(source):
    edges = planted(init="", a__x=source, b__init="", b__x="from . import y", b__y="")
    (problem,) = import_graph.against(("__init__", "a", "b"), edges, "p")
    assert problem.startswith("p.a.x imports p.b")
    assert import_graph.against(("__init__", "b", "a"), edges, "p") == []


def test_a_planted_folder_without_a_place_in_the_order_is_found():
    edges = planted(init="", a__x="", new__x="")
    assert import_graph.against(("__init__", "a"), edges, "p") == ["p.new.x has no place in the order"]


MAY_SHARE_A_NAME = ("__init__.py", "__main__.py")
"""Their names define how Python uses them, not their contents."""


def shared_names(root):
    """File names that occur more than once below a folder, ignoring symbolic links and build outputs."""
    places = defaultdict(list)
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f != "__pycache__"]
        for name in files:
            if name not in MAY_SHARE_A_NAME:
                places[name].append(str(Path(folder, name).relative_to(root)))
    return {name: sorted(paths) for name, paths in places.items() if len(paths) > 1}


@pytest.mark.parametrize("tree", TREES)
def test_no_two_files_of_a_tree_share_a_name(tree):
    assert shared_names(TREES[tree]) == {}


def test_a_planted_second_file_of_one_name_is_found(tmp_path):
    for path in ("report.py", "a/report.py", "a/__init__.py", "b/__init__.py", "a/__pycache__/x.pyc", "b/x.pyc"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert shared_names(tmp_path) == {"report.py": ["a/report.py", "report.py"]}


MIRRORED = {"hal", "ops", "model", "backends", "benchmarks"}
NOT_MIRRORED = {
    "helpers",  # what several folders of tests share
    "fixtures",  # files that tests read
    "faults",  # schedules of faults and fuzzers, over all folders
    "docs",  # pages of docs/ that are followed, and commands that no module of their own implements
}


def misplaced(root):
    """Folders in tests/ that mirror no folder of the project, and tests of the model outside its folders."""
    problems = []
    for folder, folders, files in os.walk(root / "tests"):
        folders[:] = [f for f in folders if f != "__pycache__"]
        first, *rest = Path(folder).relative_to(root / "tests").parts or ("",)
        if first in NOT_MIRRORED:
            folders.clear()
        elif first and not (first in MIRRORED and root.joinpath(first, *rest).is_dir()):
            problems.append(f"tests/{'/'.join((first, *rest))} mirrors no folder")
        if (first, rest) == ("model", []):
            problems += [f"tests/model/{f} lies in no folder" for f in sorted(files) if f.startswith("test_")]
    return sorted(problems)


def test_tests_lie_in_the_folders_of_what_they_test():
    report(misplaced(ROOT))


def test_planted_folders_and_files_in_the_wrong_place_are_found(tmp_path):
    for path in ("model/gpt", "hal", "tests/helpers/x", "tests/hal/gone", "tests/model/gpt", "tests/other"):
        (tmp_path / path).mkdir(parents=True)
    for path in ("model/test_a.py", "model/conftest.py", "model/gpt/test_b.py", "test_c.py"):
        (tmp_path / "tests" / path).touch()
    assert misplaced(tmp_path) == [
        "tests/hal/gone mirrors no folder",
        "tests/model/test_a.py lies in no folder",
        "tests/other mirrors no folder",
    ]


def lines_below(folder):
    """Lines of the files that every GPT needs."""
    of_some = "moe.py", "latent_attention.py", "gated_delta_net.py", "float8.py"
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py") if path.name not in of_some)


def test_the_thin_gpt_is_thin(tmp_path):
    assert 500 < lines_below(ROOT / "model" / "gpt") < 1000
    (tmp_path / "moe.py").write_text("x = 1\n" * 1000)
    assert lines_below(tmp_path) == 0
    (tmp_path / "long.py").write_text("x = 1\n" * 1000)
    assert not lines_below(tmp_path) < 1000
