"""docs/cuda-launches.md: what one layer of the thin GPT launches, counted on the simulator."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hal.backends.cuda import Cuda, cublaslt, launch
from hal.backends.cuda.attention import stand_ins
from hal.model.config.schema import Config
from hal.model.gpt.model import GPT

PAGE = Path(__file__).parents[3] / "docs" / "cuda-launches.md"
KINDS = ("HAL's kernels", "attention", "products", "other")

_LLAMA = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "disable_bias_linear": True,
    "num_query_groups": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "GPT-2, SBH": {"shape_order": "SBH"},
    "Llama": _LLAMA,
    "Llama, SBH": {**_LLAMA, "shape_order": "SBH"},
}

VIEWS = {
    *(
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "detach",
        "expand",
        "narrow",
        "permute",
        "select",
        "slice",
    ),
    *("split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
}
"""Operations of torch that launch nothing."""


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts, within a `with` block, launches by KINDS; a stand-in for a kernel of torch counts as one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        run = launch.run

        def count(*args: Any, **kwargs: Any) -> None:
            self.counts["HAL's kernels"] += 1
            run(*args, **kwargs)

        patch.setattr(launch, "run", count)
        for name in ("flash_forward", "flash_backward"):
            patch.setattr(stand_ins, name, self._as_one(getattr(stand_ins, name), "attention"))
        patch.setattr(cublaslt, "stand_in", self._as_one(cublaslt.stand_in, "products"))

    def _as_one(self, kernel: Any, kind: str) -> Any:
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            self.counts[kind] += 1
            with _disable_current_modes():
                return kernel(*args, **kwargs)

        return stand_in

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in VIEWS:
            self.counts["products" if name in ("mm", "addmm") else "other"] += 1
        return func(*args, **(kwargs or {}))


def _counts(layers: int, options: dict[str, Any]) -> list[Counter[str]]:
    """The launches of a forward and of a backward pass of a model with so many layers."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "seq_length": 16, "vocab_size": 64}
    dropout = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    model = GPT(Config(num_layers=layers, bf16=True, **sizes, **dropout, **options), torch.device("cpu"))
    tokens = torch.arange(16)[None]
    with pytest.MonkeyPatch.context() as patch:
        with Launches(patch) as forward:
            loss = model.loss(model(tokens), tokens, inplace_backward=True)
        counts = [forward.counts.copy()]
        forward.counts.clear()
        with forward:
            loss.backward()
        return [*counts, forward.counts]


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_launches_what_the_page_says(simulated: Cuda, name: str) -> None:
    one, two = _counts(1, MODELS[name]), _counts(2, MODELS[name])
    rows = []
    for direction, a, b in zip(("forward", "backward"), one, two):
        layer = [b[kind] - a[kind] for kind in KINDS]
        rows.append(f"| {name} | {direction} | {' | '.join(map(str, layer))} | {sum(layer)} |")
    missing = [row for row in rows if row not in PAGE.read_text()]
    assert not missing, "\n".join(missing)
