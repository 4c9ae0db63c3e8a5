"""A checkout of Megatron-LM for the tests that need one, named by the environment variable MEGATRON_LM."""

import os
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

CHECKOUT = Path(os.environ.get("MEGATRON_LM", ""))
TRAINER = ("triton", "six", "regex", "yaml", "pydantic")
"""Packages that megatron.training imports and no package declares as dependencies."""


def needs_checkout(*modules):
    """The marks of a test that needs the checkout, of the installed megatron-core's version, and these modules."""
    return [pytest.mark.nightly, pytest.mark.skipif(bool(reason := lacking(*modules)), reason=reason)]


def lacking(*modules):
    """Reasons why such a test cannot run; empty if it can."""
    if "MEGATRON_LM" not in os.environ:
        return "MEGATRON_LM does not name a checkout of Megatron-LM"
    about = CHECKOUT / "megatron" / "core" / "package_info.py"
    if not about.is_file():
        return f"MEGATRON_LM={CHECKOUT} is not a checkout of Megatron-LM"
    checkout_version = ".".join(re.findall(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", about.read_text(), re.MULTILINE))
    if checkout_version != version("megatron-core"):
        return f"MEGATRON_LM is a checkout of {checkout_version}, not of core_v{version('megatron-core')}"
    missing = [name for name in modules if find_spec(name) is None]
    return f"not installed, for Megatron-LM: {', '.join(missing)}" if missing else ""
