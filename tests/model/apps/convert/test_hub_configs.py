"""config.json of released models: each has the number of parameters of its release, or is refused for a reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from hal.model.apps.convert import family_weights
from hal.model.apps.convert.families import FAMILIES
from hal.model.apps.convert.hf_config import Fields
from hal.model.apps.convert.weights import ConversionError, Weights
from hal.model.apps.planning.shape import total_parameters
from hal.model.training.trainer_state import options

FACTS = yaml.safe_load((Path(__file__).parents[3] / "fixtures" / "hub_configs.yaml").read_text())


@pytest.mark.parametrize("fact", FACTS, ids=[fact["name"] for fact in FACTS])
def test_a_released_configuration(fact: dict[str, Any]) -> None:
    fields = fact["config"]
    family = FAMILIES[fields["model_type"]]
    if "refused" in fact:
        with pytest.raises(ConversionError, match=re.escape(fact["refused"])):
            family_weights.options_of(family, Fields(fields, "config.json"))
        return
    weights = Weights(family_weights.options_of(family, Fields(fields, "config.json")), {})
    config = weights.model_config(fields["vocab_size"], make_vocab_size_divisible_by=1)
    assert total_parameters(config) == fact["parameters"]
    assert family_weights.reasons_against(family, config) == []
    # What is written says the same, also of fields that the release leaves to their defaults.
    written = family_weights.fields_of(family, config)
    again = Weights(family_weights.options_of(family, Fields(written, "config.json")), {})
    read = again.model_config(fields["vocab_size"], make_vocab_size_divisible_by=1)
    assert options(read) == options(config)
    for name in set(written) & set(fields) - {"architectures", "rope_scaling", "layer_types", "hidden_act"}:
        window = name in ("sliding_window", "max_window_layers")  # one that hides nothing is not written
        assert written[name] == fields[name] or window, name


def test_several_models_of_the_facts_are_refused_and_most_are_not() -> None:
    assert 2 <= sum("refused" in fact for fact in FACTS) < len(FACTS) / 4
    assert len({fact["config"]["model_type"] for fact in FACTS}) > 14
