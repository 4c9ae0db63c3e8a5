"""Input of other programs: every limit is enforced, and every refusal is one short line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal import HalError
from hal.untrusted import (
    changeable_by_others,
    contained,
    parse_integer,
    parse_json,
    read_json,
    shown,
    who_can_replace,
)


@given(value=st.recursive(st.text() | st.integers() | st.binary() | st.floats(), st.lists))
def test_a_shown_value_is_one_short_line(value):
    assert len(shown(value)) < 100 and "\n" not in shown(value)


def test_numbers_without_a_printable_form_are_shown():
    assert shown(10**5000) == "an integer of 16610 bits" and shown(-7) == "-7"


@given(value=st.integers(-(10**18), 10**18))
def test_integers_come_back(value):
    assert parse_integer(str(value), -(10**18), 10**18, "it") == value


@pytest.mark.parametrize("text", ["", "-", "x", "1.0", " 1", "+1", "1_0", "٣", "9" * 5000, "11", "-1"])
def test_anything_else_is_no_integer(text):
    with pytest.raises(HalError, match=r"^it should be an integer in 0..10; found "):
        parse_integer(text, 0, 10, "it")


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "9" * 5000, b"\xff", "[1]" + " " * 100])
def test_json_that_is_none_is_refused_in_one_line(text):
    with pytest.raises(HalError, match=r"it is not valid JSON|it has more than 100 bytes") as caught:
        parse_json(text, "it", limit=100 if len(text) < 1000 else 1 << 20)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_a_file_beyond_its_limit_is_not_read(tmp_path):
    (tmp_path / "a.json").write_text("[1, 2]")
    assert read_json(tmp_path / "a.json", limit=6) == [1, 2]
    with pytest.raises(HalError, match="more than 5 bytes"):
        read_json(tmp_path / "a.json", limit=5)


def test_every_failure_of_a_library_is_contained_but_not_a_request_to_stop():
    class Panic(BaseException):
        pass

    for failure in (Panic("a\nb"), ValueError("a b"), MemoryError("a b")):
        with pytest.raises(HalError, match=r"^the file: a b"), contained("the file"):
            raise failure
    for passed in (KeyboardInterrupt(), FileNotFoundError()):
        with pytest.raises(type(passed)), contained("the file"):
            raise passed


def test_a_link_that_another_user_could_replace_is_not_safe(tmp_path):
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "shared").mkdir()
    (tmp_path / "private").mkdir(mode=0o700)
    for name in ("shared", "private"):
        (tmp_path / name / "link").symlink_to("../own")
    (tmp_path / "private" / "long way").symlink_to(tmp_path / "shared" / "link")
    (tmp_path / "private" / "circle").symlink_to("circle")
    (tmp_path / "shared").chmod(0o777)
    assert who_can_replace(tmp_path / "private" / "link") == ""
    for unsafe in ("shared/link", "private/long way"):
        assert "shared is writable by others (mode 0o777)" in who_can_replace(tmp_path / unsafe)
    assert "symbolic links" in who_can_replace(tmp_path / "private" / "circle")
    (tmp_path / "shared").chmod(0o1777)  # in which others can create links, but not replace this one
    assert who_can_replace(tmp_path / "shared" / "link") == ""


def test_a_file_that_others_may_write_to_is_changeable(tmp_path):
    file = tmp_path / "file"
    file.touch(0o640)
    assert not changeable_by_others(file)
    file.chmod(0o660)
    assert changeable_by_others(file)
