"""HAL's thin GPT and megatron-core's GPTModel train identically: losses, gradients and gradient norms, by step."""

import pytest
from parity_runs import Case, compare, rank_of

from hal.testing.processes import run_processes

WITHIN = 1e-6  # float32: sums in another order


@pytest.mark.parametrize("model", ["gpt2", "llama"])
@pytest.mark.parametrize("spec", ["local", "hal"])
def test_one_process(model, spec, world):
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    errors = compare(Case(model, spec))
    assert errors["losses"] == 6
    assert max(errors["loss"], errors["grad"], errors["norm"]) <= WITHIN, errors


def test_a_window_is_the_same_window(world):
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    errors = compare(Case("gpt2", "hal", window=(5, 0)))
    assert max(errors["loss"], errors["grad"], errors["norm"]) <= WITHIN, errors


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("gpt2", "local", tp=2, pp=2), marks=pytest.mark.slow),
        pytest.param(Case("llama", "hal", tp=2, pp=2, sequence=True), marks=pytest.mark.slow),
        pytest.param(Case("gpt2", "hal", tp=2, pp=2), marks=pytest.mark.nightly),
        pytest.param(Case("llama", "hal", cp=2), marks=pytest.mark.nightly),
        pytest.param(Case("gpt2", "hal", tp=2, cp=2, sequence=True, cp_comm_type="a2a"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_on_many_processes(case):
    errors = run_processes(case.tp * case.pp * case.cp, rank_of, case, timeout=240)
    assert sum(f["losses"] for f in errors) == 6 * case.tp * case.cp
    assert max(f[key] for f in errors for key in ("loss", "grad", "norm")) <= WITHIN, errors
