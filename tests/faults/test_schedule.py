"""The seeded schedule of faults: a few in the slow suite, 200 each night (`make faults` prints the table)."""

import pytest
import schedule


@pytest.mark.slow
@pytest.mark.parametrize("layout", schedule.LAYOUTS)
def test_a_few_faults_lose_nothing(layout, tmp_path):
    results = schedule.run(4, seed=7, layouts=[layout], root=tmp_path)
    assert [r for r in results if r[2]] == []


@pytest.mark.nightly
def test_two_hundred_faults_lose_nothing(tmp_path):
    results = schedule.run(200, seed=1, layouts=list(schedule.LAYOUTS), root=tmp_path)
    assert [r for r in results if r[2]] == []
