"""--sample: a share of the tests, the same for the same seed; nightly tests are slow."""

import pytest
from seeded_sample import chosen

pytest_plugins = ["pytester"]

NAMES = [f"tests/x.py::test[{n}]" for n in range(2000)]


def sample(share, seed):
    return {name for name in NAMES if chosen(name, share, seed)}


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_a_sample_is_about_the_share_it_is_asked_for(share):
    assert len(sample(share, "a")) == pytest.approx(share * len(NAMES), rel=0.15)
    assert sample(1.0, "a") == set(NAMES)


def test_a_seed_chooses_the_sample_and_a_larger_share_adds_to_it():
    assert sample(0.2, "a") == sample(0.2, "a") != sample(0.2, "b")
    assert sample(0.2, "a") < sample(0.4, "a")


TESTS = """
import pytest

@pytest.mark.parametrize("n", range(40))
@pytest.mark.nightly
def test_n(n):
    pass

@pytest.mark.slow
def test_slow():
    pass

def test_quick():
    pass
"""


@pytest.fixture
def session(pytester):
    """Runs pytest with options on TESTS, in this process."""
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    nightly\n")
    return lambda *options: pytester.runpytest_inprocess("-p", "seeded_sample", *options)


def test_the_options_choose_among_what_is_selected(session):
    file = "test_the_options_choose_among_what_is_selected.py"
    sample = [n for n in range(40) if chosen(f"{file}::test_n[{n}]", 0.25, "s")]
    assert 0 < len(sample) < 40
    result = session("-m", "nightly", "--sample", "0.25", "--sample-seed", "s")
    result.assert_outcomes(passed=len(sample), deselected=42 - len(sample))
    result.stdout.fnmatch_lines("a sample of 0.25 of the tests: * --sample 0.25 --sample-seed s")


@pytest.mark.parametrize("selection, passed", [("not slow", 1), ("slow and not nightly", 1), ("slow", 41)])
def test_what_is_nightly_is_slow(session, selection, passed):
    session("-m", selection).assert_outcomes(passed=passed, deselected=42 - passed)


@pytest.mark.parametrize("share", ["0", "2", "half"])
def test_a_share_that_is_none_is_refused(session, share):
    assert session("--sample", share).ret == pytest.ExitCode.USAGE_ERROR
