"""Options of checkpoints that older versions wrote."""

from pathlib import Path

from hal.model.checkpoint.saved_config import saved_options


def test_an_option_that_had_no_default_is_absent():
    state = {"config": {"fp8_recipe": None, "num_layers": 3, "save": None}}
    assert saved_options(state, Path("folder")) == {"num_layers": 3}
