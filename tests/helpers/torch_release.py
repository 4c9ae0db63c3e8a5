"""Marks tests of what the oldest supported release of torch lacks (`make test-oldest-torch`)."""

from __future__ import annotations

import pytest
import torch


def newer_torch(lacking: str) -> pytest.MarkDecorator:
    """Skips the test with torch 2.6, which is lacking this."""
    return pytest.mark.skipif(torch.__version__.startswith("2.6."), reason=f"torch 2.6: {lacking}")
