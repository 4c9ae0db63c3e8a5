"""The Config of a file that is given as dotted keys, and the error of a wrong one."""

import json

import pytest
import yaml
from nested_keys import nested

from hal.model.config.command_line import parse
from hal.model.config.schema import ConfigError


@pytest.fixture
def from_file(tmp_path):
    """The Config of a file with the given dotted keys, and more options."""

    def make(keys, *argv, option="--config", environ=None):
        path = tmp_path / ("c.yaml" if option == "--config" else "ds.json")
        path.write_text(yaml.safe_dump(nested(keys)) if option == "--config" else json.dumps(nested(keys)))
        return parse([option, str(path), *argv], environ or {})

    return make


@pytest.fixture
def problem(from_file):
    def find(keys, *argv, **how):
        with pytest.raises(ConfigError) as caught:
            from_file(keys, *argv, **how)
        assert "\n" not in str(caught.value).split(" (see ")[0]
        return str(caught.value)

    return find
