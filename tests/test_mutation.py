"""The mutation runner's own rules: every kind of mutant is created, text is not changed, its lists are current."""

from __future__ import annotations

import json

import mutation
import pytest

SOURCE = '''
if TYPE_CHECKING:
    LIMIT = 1
def f(a: int = 1, *, b=True) -> int:
    """Adds 1."""
    if a:
        raise ValueError(f"{a + 1} is" + " wrong" * 2)
    total = a + 1 if not b and a <= 2 else -a
    return total
'''


def test_every_kind_of_mutant_and_no_text() -> None:
    mutants = mutation.mutants("f.py", SOURCE)
    assert [(m.line, m.kind) for m in mutants] == [
        (4, "constant"),
        (4, "constant"),
        (6, "negation"),
        (8, "boolean"),
        (8, "negation"),
        (8, "comparison"),
        (8, "constant"),
        (8, "arithmetic"),
        (8, "constant"),
        (9, "return"),
    ]
    for m in mutants:
        changed_lines = [(a, b) for a, b in zip(SOURCE.splitlines(), m.source.splitlines(), strict=True) if a != b]
        assert len(changed_lines) == 1, "each changes one line of the source"
        compile(m.source, m.file, "exec")
    (comparison,) = (m for m in mutants if m.kind == "comparison")
    assert (comparison.before, comparison.after) == ("not b and a <= 2", "not b and a < 2")


def test_a_sample_has_as_many_of_each_file_as_there_are() -> None:
    files = ["model/gpt/kv_cache.py", "hal/mesh.py", "hal/rng.py"]
    sample = mutation.draw(files, 9, seed=1)
    assert [m.file for m in sample] == sorted(files * 3) and len(set(sample)) == 9
    assert sample == mutation.draw(files, 9, seed=1) != mutation.draw(files, 9, seed=2)
    assert set(mutation.draw(files[:1], 3, seed=1)) < set(sample), "independent of the other files"
    listed = {(e["file"], e["before"], e["after"]) for e in json.loads(mutation.EQUIVALENT.read_text())}
    everything = mutation.draw(["hal/core/dispatch.py"], 10**6, seed=1)
    mutants = mutation.mutants("hal/core/dispatch.py", (mutation.ROOT / "hal/core/dispatch.py").read_text())
    assert {m for m in mutants if m not in everything} == {m for m in mutants if (m.file, m.before, m.after) in listed}


@pytest.mark.parametrize("file", mutation.TESTS)
def test_the_table_and_the_equivalent_mutants_are_of_the_code_as_it_is(file: str) -> None:
    assert all((mutation.ROOT / "tests" / test).is_file() for test in mutation.TESTS[file].split())
    mutants = {(m.before, m.after) for m in mutation.mutants(file, (mutation.ROOT / file).read_text())}
    listed = [e for e in json.loads(mutation.EQUIVALENT.read_text()) if e["file"] == file]
    assert {(e["before"], e["after"]) for e in listed} <= mutants, "a listed mutant no longer exists"
    assert all(e["reason"] for e in listed)
