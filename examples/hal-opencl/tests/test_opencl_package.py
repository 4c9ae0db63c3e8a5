"""Tests of the package: it uses only public names, is found by its entry point, and has an up-to-date README."""

import subprocess
import sys
from pathlib import Path

import hal_opencl

import hal
from hal.testing.purity import backend_rule, check_tree

PACKAGE = Path(hal_opencl.__file__).resolve().parent
HERE = Path(__file__).resolve().parents[1]


def test_it_uses_public_names_only():
    violations = check_tree(PACKAGE, backend_rule("hal_opencl"), package="hal_opencl")
    assert not violations, "\n".join(map(str, violations))


def test_it_is_found_by_its_entry_point():
    assert hal.backend_names()["opencl"].startswith("hal-opencl ")


def test_importing_it_touches_no_driver(tmp_path):
    code = "import sys, hal_opencl; print('pyopencl' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "False"


AFTER_A_CHANGE = """
import torch, hal
from hal import ops

old = ops.swiglu

def swiglu(x: torch.Tensor, bias: torch.Tensor | None = None, *, limit: float | None = None) -> torch.Tensor:
    return old.reference(x, bias).clamp(max=limit)

del hal.OPS["swiglu"]
ops.swiglu = hal.op(check=lambda call: None, tol=old.tol, samples=old.samples, grads=old.grads)(swiglu)
hal.use("opencl")
x = torch.randn(3, 8, requires_grad=True)
y = ops.swiglu(x)
y.sum().backward()
torch.testing.assert_close(y, old.reference(x))
assert x.grad.any()
print(hal.why(ops.swiglu, x, limit=1.0).reasons)
"""


def test_it_still_loads_after_an_op_has_gained_a_parameter(tmp_path):
    """As after an update of HAL: the package was written for the old signature of swiglu."""
    code = [sys.executable, "-c", AFTER_A_CHANGE]
    done = subprocess.run(code, capture_output=True, text=True, cwd=tmp_path)
    reasons = {"opencl/cl": ("limit (the implementation has no such parameter)",)}
    assert done.stdout.strip() == str(reasons), done.stderr


def test_the_kernels_are_shipped_and_each_file_is_used():
    code = "".join(p.read_text() for p in PACKAGE.glob("*.py"))
    files = sorted((PACKAGE / "kernels").glob("*.cl"))
    assert files
    assert [p.name for p in files if f'"{p.stem}"' not in code] == []


def test_the_readme_counts_the_cost_as_it_is():
    sys.path.insert(0, str(HERE))
    import cost

    assert cost.table() in (HERE / "README.md").read_text(), "run: python cost.py --write"
