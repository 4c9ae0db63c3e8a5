"""The seeded schedule of faults: a few in the slow suite, 200 on both layouts in the nightly run (`make faults`)."""

import pytest
import schedule


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2 pp2", pytest.param("dp2 zero", marks=pytest.mark.nightly)])
def test_a_few_faults_lose_nothing(layout, tmp_path):
    results = schedule.run(4, seed=7, layouts=[layout], root=tmp_path)
    assert [r for r in results if r[2]] == []
