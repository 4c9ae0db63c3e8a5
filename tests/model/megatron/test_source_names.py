"""All of megatron-core's source is parsed: new references to a device are found in any file and any spelling."""

from pathlib import Path

import pytest
import source_names
from source_names import complaints, names_in

from hal.model.megatron import CORE


def core():
    import megatron.core

    return Path(megatron.core.__file__).parent


def test_the_names_of_megatron_cores_source_are_routed_or_known_to_be_unused():
    assert not complaints(core())


@pytest.mark.parametrize(
    "source, name",
    [
        ("x.to('cuda')", "to('cuda')"),
        ("x.to(device=f'cuda:{i}')", "to('cuda')"),
        ("torch.full((2,), 1.0, device='cuda')", "torch.full"),
        ("torch.full((2,), 1.0, device='cuda:0')", "torch.full"),
        ("torch.device('cuda', 1)", "torch.device"),
        ("torch.arange(3, device='cuda' if fast else 'cpu')", "'cuda'"),
        ("def f(x, device='cuda'): pass", "'cuda'"),
        ("if x.device.type == 'cuda': pass", "'cuda'"),
        ("x.cuda()", "torch.Tensor.cuda"),
        ("x.is_cuda", ".is_cuda"),
        ("torch.cuda.fresh(1)", "torch.cuda.fresh"),
        ("torch.cuda.nvtx.mark('x')", "torch.cuda.nvtx.mark"),
        ("def f(stream: torch.cuda.Stream): pass", "torch.cuda.Stream"),
        ("from torch import cuda\ncuda.fresh()", "torch.cuda.fresh"),
        ("from torch import cuda as c\nc.fresh()", "torch.cuda.fresh"),
        ("import torch.cuda as c\nc.fresh()", "torch.cuda.fresh"),
        ("import torch as t\nt.cuda.fresh()", "torch.cuda.fresh"),
        ("from torch.cuda import fresh as f\nf()", "torch.cuda.fresh"),
        ("from torch.cuda.amp import *", "torch.cuda.amp.*"),
        ("c = torch.cuda", "torch.cuda"),
        ("getattr(torch, name)()", "torch"),
        ("getattr(torch.cuda, 'fresh')()", "torch.cuda"),
        ("getattr(x, 'cuda')()", "getattr('cuda')"),
        ("importlib.import_module('torch.cuda')", "'torch.cuda'"),
        ("assert p.type() == 'torch.cuda.FloatTensor'", "torch.Tensor.type"),
        ("torch._C._cuda_fresh()", "torch._C._cuda_fresh"),
        ("import torch.distributed as d\nd.all_gather_into_tensor(a, b)", "torch.distributed.all_gather_into_tensor"),
        ("torch.distributed.ProcessGroupNCCL.Options()", "torch.distributed.ProcessGroupNCCL.Options"),
        ("torch.distributed.new_group(backend='nccl')", "'nccl'"),
    ],
)
def test_a_name_is_found_however_it_is_written(source, name):
    assert name in [full_name for _, full_name in names_in(f"import torch\n{source}\n")]


@pytest.mark.parametrize(
    "source",
    [
        "'''torch.cuda is used, as in x.to('cuda')'''",
        "def f():\n    '''moves to cuda'''",
        "x = 1  # torch.cuda.fresh()",
        "from megatron.core.transformer.cuda_graphs import is_graph_capturing\nis_graph_capturing()",
        "self.cuda_graph_scope",
        "x.to('cpu')",
        "raise RuntimeError('cuda graphs are not there')",
    ],
)
def test_what_is_no_name_of_a_device_is_left_alone(source):
    assert names_in(f"import torch\n{source}\n") == []


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A package that uses every routed name once, with one folder that is excluded."""
    lines = [f"{name}()" for name in CORE if name not in ("torch.Tensor.cuda", "torch.Tensor.type")]
    # The factories are recognised by their device argument.
    lines = [line.replace("()", "(1, device='cuda')") if line.count(".") == 1 else line for line in lines]
    (tmp_path / "used.py").write_text(
        "\n".join(["import torch", *lines, "x.cuda().type() == 'torch.cuda.FloatTensor'"])
    )
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "away.py").write_text("import torch\ntorch.cuda.fresh()")
    monkeypatch.setattr(source_names, "OUT_OF_REACH", {"far": "a reason"})
    monkeypatch.setattr(source_names, "HARMLESS", {"used.py": {}})
    assert complaints(tmp_path) == []
    return tmp_path


def test_a_new_name_is_a_complaint_that_says_where_and_what_to_do(small):
    (small / "fresh.py").write_text("import torch\n\ndef f(x):\n    return torch.cuda.fresh(x)\n")
    (complaint,) = complaints(small)
    assert complaint.startswith("fresh.py:4 uses torch.cuda.fresh, which is new: route it (CORE in ")
    assert "source_names.py" in complaint


def test_a_name_that_is_harmless_in_one_file_is_not_in_another(small, monkeypatch):
    (small / "fresh.py").write_text("import torch\ntorch.cuda.nvtx.range_push()")
    monkeypatch.setattr(
        source_names, "HARMLESS", {"used.py": {}, "fresh.py": {"torch.cuda.nvtx.range_push": "a reason"}}
    )
    assert complaints(small) == []
    (small / "other.py").write_text("import torch\ntorch.cuda.nvtx.range_push()")
    assert [c.partition(",")[0] for c in complaints(small)] == ["other.py:2 uses torch.cuda.nvtx.range_push"]


def test_what_is_gone_is_a_complaint(small, monkeypatch):
    monkeypatch.setattr(source_names, "HARMLESS", {"used.py": {"torch.cuda.nvtx.range_push": "a reason"}})
    monkeypatch.setattr(source_names, "OUT_OF_REACH", {"far": "a reason", "further": "another"})
    text = (small / "used.py").read_text()
    (small / "used.py").write_text(text.replace("torch.cuda.manual_seed()\n", ""))
    assert complaints(small) == [
        "used.py no longer uses torch.cuda.nvtx.range_push: drop it from HARMLESS",
        "further is gone: drop it from OUT_OF_REACH",
        "torch.cuda.manual_seed is no longer used: drop it from CORE",
    ]
