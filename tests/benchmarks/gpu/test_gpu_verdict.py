"""The verdict: every claim is a sentence of its page, and rows confirm and refute each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hal.backends.cuda.order import orders
from hal.bench.gpu import checks as gpu_checks
from hal.bench.gpu.kernel_cases import BEYOND
from hal.bench.gpu.verdict import CLAIMS, HOLDS, OPEN, REFUTED, page

RUN = {"sources": "s", "commit": "c", "date": "d"}
DOCS = Path(__file__).parents[3] / "docs"


def _words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text[:40])
def test_a_claim_is_on_its_page(claim):
    assert claim.text in _words((DOCS / claim.page).read_text())


def part(*rows):
    unit = {"done": True, "rows": rows, **RUN}
    return {"state": "complete", "why": "", "current": "", "seconds": 1.0, "units": {"u": unit}}


def kit(op, status, implementation="cuda/kernel"):
    return {"op": op, "dtype": "float32", "implementation": implementation, "status": status, "samples": 3}


def case(name, shape="s", *, seconds=1e-3, ratio=1.5, share=None, rate=None, error=0.5, peer="cuda/flash"):
    row = {
        "name": name,
        "shape": shape,
        "peer": peer,
        "ratio_median": ratio,
        "seconds": seconds,
        "error_in_tolerances": error,
    }
    return {**row, "share_of_ceiling": share, "flops_per_second": rate}


def report(good: bool, device="NVIDIA H100 80GB HBM3", simulated=False):
    """A report in which every row speaks for the claims, or against them."""
    status, problem = ("pass", "") if good else ("fail", "no")
    ops = ("adamw", "philox_uniform")
    checks = [getattr(gpu_checks, name) for name in ("LATE", "NO_SCORES", "NO_READS", "RECORDED", "FLOAT32_SUMS")]
    checks.append("graph of adamw")
    tried = orders(device, "sm_90")
    first, second = tried["square"][:2] if good else tried["square"][1::-1]
    dropout, window = "attention with dropout", "attention window 1024 fwd"
    layouts = {"one process": [1.0, 0.5], "pipeline": [1.0, 0.5 if good else 0.9]}
    return {
        "machine": {"device": device, "architecture": "sm_90", "simulated": simulated, **RUN},
        "parts": {
            "parity": part(*(kit(op, status) for op in ops), kit("flash_attention", status, "cuda/fused")),
            "checks": part(*({"name": name, "problem": problem} for name in checks)),
            "kernels": part(case("rms_norm fwd", share=0.9 if good else 0.5)),
            "large": part(case("rms_norm fwd", f"8, {BEYOND}", share=0.9, error=0.5 if good else 2.0)),
            "attention": part(
                case("attention causal fwd", peer=first, ratio=1.0 if good else 0.9),
                case("attention causal fwd", peer=second, ratio=1.2),
                case(window, peer=tried["window"][0 if good else 1], ratio=1.0),
                case(f"{dropout} fwd", seconds=1e-3, rate=150e12 if good else 20e12),
                case(f"{dropout} fwd+bwd", seconds=4.5e-3 if good else 9e-3),
            ),
            "training": part(
                *({"backend": b, "losses": [1.0 if good or b == "cuda" else 2.0]} for b in ("cuda", "cpu_ref"))
            ),
            "multi": part(*({"layout": name, "losses": losses} for name, losses in layouts.items())),
        },
    }


def verdicts(of):
    return {claim.text: claim.judge(of).verdict for claim in CLAIMS}


def test_rows_confirm_or_refute_every_claim():
    other = "90 to 140 on an A100"
    for good, verdict in ((True, HOLDS), (False, REFUTED)):
        judged = verdicts(report(good))
        assert judged.pop(other) == OPEN
        assert set(judged.values()) == {verdict}, judged
    assert verdicts(report(False, device="NVIDIA A100-SXM4-80GB"))[other] == REFUTED


def test_without_rows_every_claim_is_open_and_says_what_is_missing():
    empty = {"machine": {"device": "NVIDIA H100", "architecture": "sm_90"}, "parts": {}}
    judgements = [claim.judge(empty) for claim in CLAIMS]
    assert {j.verdict for j in judgements} == {OPEN} and all(j.evidence for j in judgements)


def test_the_page_counts_and_shows_each_claim_with_its_evidence():
    text = page(report(False))
    assert f"Of {len(CLAIMS)} claims of the docs: 0 holds, {len(CLAIMS) - 1} refuted, 1 open." in text
    assert "| **refuted** | 20 TFLOP/s (median of 1 rows `attention with dropout fwd`) |" in text
    first, second = orders("NVIDIA H100 80GB HBM3", "sm_90")["square"][:2]
    assert f"{first} is tried first, {second} is the fastest" in text
    assert sum(line.startswith("| ") for line in text.splitlines()) == len(CLAIMS) + 1


def test_the_times_of_a_rehearsal_decide_nothing():
    judged = verdicts(report(False, simulated=True))
    assert (
        judged["Kernels reach 85 % of a copy's bandwidth, forward and backward, on tensors larger than the L2 cache."]
        == OPEN
    )
    assert judged["beyond 2^31 elements"] == REFUTED  # its values are real
    assert "nothing here is about a GPU" in page(report(True, simulated=True))


def test_the_page_names_the_commits_of_rows_of_other_sources():
    of_others = report(True)
    of_others["machine"]["sources"] = "later"
    assert "with the sources of c (d)" in page(of_others)
    assert "with the sources of" not in page(report(True))
