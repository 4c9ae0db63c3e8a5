"""Imports of packages that only some functions need, and that are not always installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hal import HalError


@contextlib.contextmanager
def optional_package(purpose: str, install: str, error: type[HalError] = HalError) -> Iterator[None]:
    """Raises `error` instead of an ImportError of the block; the message names the purpose and how to install the
    package.

    purpose: the beginning of the message ("x needs y"). install: what pip installs it by ("torch-hal[train]").
    """
    try:
        yield
    except ImportError as missing:
        raise error(f"{purpose} ({missing}); install it with: pip install '{install}'") from None
