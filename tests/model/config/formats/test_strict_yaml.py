"""YAML with anchors, within limits; duplicate keys are an error."""

import pytest

from hal.model.config.command_line import parse
from hal.model.config.formats.strict_yaml import load
from hal.model.config.schema import ConfigError


def test_anchors_are_followed_within_a_limit(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("num-layers: &n 3\nmicro-batch-size: *n\n")
    assert parse(["--config", str(path)], {}).micro_batch_size == 3
    path.write_text("model_config: &m {hidden_size: 64}\ntraining_config: {<<: *m, seed: 3}\n")
    with pytest.raises(ConfigError, match=r"training_config\.hidden_size: there is no such key"):
        parse(["--config", str(path)], {})
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="expand to more than 100000 values"):
        parse(["--config", str(path)], {})
    path.write_text("a: &a [*a]")
    with pytest.raises(ConfigError, match="cannot be read"):
        parse(["--config", str(path)], {})
    path.write_text("num-layers: 2\nnum-layers: 3\n")
    with pytest.raises(ConfigError, match="the key 'num-layers' is here twice"):
        parse(["--config", str(path)], {})


@pytest.mark.parametrize("number", ["9" * 401, "1" + ":1" * 200, "-" + "1" * 401 + ".5"])
def test_a_number_that_takes_long_to_read_is_refused(tmp_path, number):
    path = tmp_path / "c.yaml"
    path.write_text(f"lr: {number}\n")
    with pytest.raises(ConfigError, match="a number has more than 400 characters"):
        parse(["--config", str(path)], {})


@pytest.mark.parametrize("key", [2**61 - 1, -(2**61), "0x7fffffffffffffff", "1:30:00:00:00:00:00:00:00:00:00:00"])
def test_integers_whose_hashes_collide_are_no_keys(tmp_path, key):
    """A mapping of many multiples of 2**61 - 1 would take quadratic time."""
    (tmp_path / "a.yaml").write_text(f"a: {{1: b, -5: c}}\nd: {{{key}: e}}\n")
    with pytest.raises(ConfigError, match=r"the key .* is too large"):
        load(tmp_path / "a.yaml", "a.yaml")
    (tmp_path / "a.yaml").write_text(f"a: {{1: b, {2**61 - 2}: c}}\nd: {key}\n")
    assert load(tmp_path / "a.yaml", "a.yaml")["a"] == {1: "b", 2**61 - 2: "c"}


@pytest.mark.parametrize("text", ["a: {%s}", "%s"])
def test_a_file_of_very_many_keys_is_refused(tmp_path, text):
    """A suggestion is searched for each unknown key, which takes 3 ms."""
    path = tmp_path / "a.yaml"
    separator = ", " if "a" in text else "\n"
    path.write_text(text % separator.join(f"k{n}: 1" for n in range(2001)))
    with pytest.raises(ConfigError, match="there are more than 2000 keys"):
        load(path, "a.yaml")
    path.write_text(text % separator.join(f"k{n}: 1" for n in range(1999)))
    assert load(path, "a.yaml")
