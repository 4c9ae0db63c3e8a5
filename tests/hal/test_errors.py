"""The taxonomy: what can be caught as what, and what the one built message says."""

import pytest

import hal
from hal import errors


def test_every_error_is_a_hal_error_and_is_exported():
    classes = [v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, Exception)]
    assert all(issubclass(c, hal.HalError) for c in classes)
    assert {c.__name__ for c in classes} <= set(hal.__all__)
    assert all(c.__doc__ for c in classes)


def test_two_of_them_are_also_a_standard_exception():
    assert issubclass(hal.ContractError, ValueError)
    assert issubclass(hal.UnsupportedOp, NotImplementedError)


def test_require_says_what_was_asked_found_and_to_do():
    hal.require(True, "toy", "nothing", "nothing")
    with pytest.raises(hal.ContractError, match=r"^toy: expected an even size; found 3\. Pad it\.$"):
        hal.require(False, "toy", "an even size", 3, "Pad it.")


def test_a_collective_timeout_names_group_rank_collective_and_absentees():
    error = hal.CollectiveTimeout("tp", 1, "all_reduce", 7, [0, 3], 60.0)
    assert (error.group, error.rank, error.op, error.seq, error.absent) == ("tp", 1, "all_reduce", 7, (0, 3))
    assert "all_reduce #7 on group 'tp' timed out after 60 s on rank 1" in str(error)
    assert "did not arrive: 0, 3" in str(error)
    assert "the transport does not say" in str(hal.CollectiveTimeout("tp", 1, "all_reduce", 7, [], 60.0))
