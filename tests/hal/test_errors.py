"""The error classes: which base classes catch which errors, and the one generated message."""

import re
from pathlib import Path

import pytest

import hal
from hal import errors


def test_every_error_is_a_hal_error_and_is_exported():
    classes = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert all(issubclass(c, hal.HalError) for c in classes)
    assert {c.__name__ for c in classes} <= set(hal.__all__)
    assert all(c.__doc__ for c in classes)


PAGE = Path(hal.__file__).resolve().parents[1] / "docs" / "errors.md"
TAXONOMY = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]


def test_the_page_has_a_section_for_every_error_and_no_other():
    sections = re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(c.__name__ for c in TAXONOMY)
    parts = re.split(r"^## \w+$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    assert all("**What to do**" in part for part in parts)


@pytest.mark.parametrize("kind", TAXONOMY, ids=lambda c: c.__name__)
def test_every_message_leads_to_its_section(kind):
    given = {hal.CollectiveTimeout: ("tp", 1, "all_reduce", 7, [0], 60.0), hal.DeviceError: ("text", ["linear"])}
    assert str(kind(*given.get(kind, ("text",)))).endswith(f" (hal explain {kind.__name__})")


def test_an_error_defined_elsewhere_leads_to_the_section_of_its_kind():
    class Mine(hal.ContractError):
        pass

    assert str(Mine("text")) == "text (hal explain ContractError)"


def test_a_message_that_quotes_another_keeps_one_reference():
    inner = hal.ContractError("no softmax")
    assert str(hal.PluginError(f"broken: {inner}, sadly")) == "broken: no softmax, sadly (hal explain PluginError)"


def test_two_of_them_are_also_a_standard_exception():
    assert issubclass(hal.ContractError, ValueError)
    assert issubclass(hal.UnsupportedOp, NotImplementedError)


def test_require_says_what_was_asked_found_and_to_do():
    hal.require(True, "toy", "nothing", "nothing")
    with pytest.raises(
        hal.ContractError,
        match=r"^toy: expected an even size; found 3\. Pad it\. \(hal explain ContractError\)$",
    ):
        hal.require(False, "toy", "an even size", 3, "Pad it.")


def test_a_collective_timeout_names_group_rank_collective_and_absentees():
    error = hal.CollectiveTimeout("tp", 1, "all_reduce", 7, [0, 3], 60.0)
    assert (error.group, error.rank, error.op, error.seq, error.absent) == ("tp", 1, "all_reduce", 7, (0, 3))
    assert "all_reduce #7 on group 'tp' timed out after 60 s on rank 1" in str(error)
    assert "did not arrive: 0, 3" in str(error)
    assert "the transport does not report them" in str(hal.CollectiveTimeout("tp", 1, "all_reduce", 7, [], 60.0))
