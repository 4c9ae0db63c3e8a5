"""The golden loss: compares the losses of a tiny GPT trained for 20 steps on the backend and on the references.

A model can train incorrectly although every op passes its tests (a stale mask, a gradient that is added twice, dropout
that differs between forward and recomputation). Both runs have the same weights, data and dropout bits, so their
losses may differ by rounding only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hal.core.backend import Backend
from hal.core.dispatch import activated
from hal.core.op import Tol
from hal.errors import UnsupportedOp

from .checks import one_thread
from .parity_rows import Row
from .reference import Reference

STEPS = 20

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "llama": {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "num_query_groups": 2,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "pre_tokens": 12,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "unfused": {"use_flash_attn": False, "attention_dropout": 0.2, "hidden_dropout": 0.0, "geglu": True},
}
"""Model shapes; together they use every op of a training step."""

TOL = {
    torch.float32: Tol(1e-5, 0.0),  # 20 steps amplify rounding from 1e-7 to about 1e-6
    torch.bfloat16: Tol(2e-2, 0.0),  # 8 bits: a backend that rounds elsewhere drifts by up to 8e-3
}


_VOCABULARY = 61


def config(shape: str, dtype: torch.dtype, *, vocabulary: int = _VOCABULARY, **changes: Any) -> Any:
    """The training config of a golden run (hal.model.config.schema.Config); `changes` replace its options."""
    from hal.model.config.schema import Config

    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "seq_length": 24,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "train_iters": STEPS,
        "lr_warmup_iters": 2,
        "make_vocab_size_divisible_by": 1,
    }
    golden = Config(**{**defaults, **SHAPES[shape], **changes}, lr=1e-2, bf16=dtype == torch.bfloat16)
    golden.set_vocabulary(vocabulary)
    return golden


class _Data:
    """Sequences t[i+1] = (a t[i] + 5) mod 61 with a = 2 or 3, which a model learns in a few steps."""

    def fetch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        rows = []
        for n in range(first, first + count):
            t = [n * 7 % _VOCABULARY]
            for _ in range(24):
                t.append((t[-1] * (2 + n % 2) + 5) % _VOCABULARY)
            rows.append(t)
        tokens = torch.tensor(rows)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@dataclass(frozen=True)
class Trace:
    """The loss and the gradient norm of every step of a run."""

    losses: list[float]
    grad_norms: list[float]


def train(shape: str, dtype: torch.dtype, steps: int = STEPS, **changes: Any) -> Trace:
    """Trains on the active backend; `changes` as in `config`."""
    from hal.model.training.trainer import make_trainer

    model_config = config(shape, dtype, **changes)
    data: Any = {"train": _Data()}
    trainer = make_trainer(model_config, data, world=1)
    results = [trainer.step() for _ in range(steps)]
    return Trace([r.loss for r in results], [r.grad_norm or 0.0 for r in results])


def check_golden(backend: Backend) -> Iterator[Row]:
    """One row per model shape and dtype."""
    for shape in SHAPES:
        for dtype in TOL:
            yield golden_row(backend, shape, dtype)


def golden_row(backend: Backend, shape: str, dtype: torch.dtype) -> Row:
    """Compares the backend's run with a run on the references. A backend whose attention has no dropout trains without
    that, but with the shape's other dropout; the row's name says so."""
    row = Row("golden_loss", str(dtype).removeprefix("torch."), backend.name, backend.simulated, "pass", 0, None)
    changes = _changes(backend, shape)
    row.implementation = f"model/{shape}{', attention dropout 0' if changes else ''}"
    try:
        with activated(backend), one_thread():
            trace = train(shape, dtype, **changes)
    except UnsupportedOp as error:
        row.status, row.reasons = "declined", [" ".join(str(error).split())]
        return row
    except Exception as error:
        row.status, row.message = "fail", f"training raised {type(error).__name__}: {error}"
        row.code = _code(backend, shape, dtype)
        return row
    with activated(Reference()), one_thread():
        expected = train(shape, dtype, **changes)
    row.samples = STEPS
    worst = 0.0
    for step, (y, r) in enumerate(zip(trace.losses, expected.losses), start=1):
        allowed = TOL[dtype].atol + TOL[dtype].rtol * abs(r)
        deviation = abs(y - r) / allowed if y == y else float("inf")
        if deviation > 1.0 and row.status == "pass":
            row.status, row.code = "fail", _code(backend, shape, dtype)
            row.message = f"the losses diverge at step {step}: {y:.7g}, on the references {r:.7g}"
        worst = max(worst, deviation)
    row.worst_error_in_tolerances = worst
    return row


def _changes(backend: Backend, shape: str) -> dict[str, Any]:
    """The options by which a shape is changed for a backend whose attention has no dropout."""
    dropped = SHAPES[shape].get("use_flash_attn", True) and SHAPES[shape]["attention_dropout"] > 0.0
    return {"attention_dropout": 0.0} if dropped and not backend.capabilities().attention_dropout else {}


def _code(backend: Backend, shape: str, dtype: torch.dtype) -> str:
    options = "".join(f", {k}={v!r}" for k, v in backend.options().items() if v is not None)
    call = f"golden.train({shape!r}, {dtype}{''.join(f', {k}={v}' for k, v in _changes(backend, shape).items())})"
    return (
        "import hal, torch\nfrom hal.testing import Reference, golden\n"
        f"hal.use({backend.name!r}{options})\n"
        f"print({call})\n"
        "with hal.activated(Reference()):\n"
        f"    print({call})\n"
    )
