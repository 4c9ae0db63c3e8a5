"""The seeded schedule of faults: a few on each layout. `make faults` has 200 on both."""

import pytest
import schedule


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["tp2 pp2", "dp2 zero"])
def test_a_few_faults_lose_nothing(layout, tmp_path):
    results = schedule.run(4, seed=7, layouts=[layout], root=tmp_path)
    assert [r for r in results if r[2]] == []
