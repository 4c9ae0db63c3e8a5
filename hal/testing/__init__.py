"""The conformance kit: checks that a backend fulfils the contract.

`hal parity --backend NAME`, `pytest --pyargs hal.testing --backend NAME` and `hal.testing.run(backend)` run it. They
share one engine (kit.py) and one tolerance rule (comparison.py). Names are imported on first access, so that the parts
that need neither hypothesis nor the model work without them.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .kit import EXAMPLES, replay, run, run_by_name
    from .parity_rows import Report, Row
    from .probe import ProbeFailure, check_probe
    from .reference import Reference
    from .spy import Spy
    from .subject import Failure

_HOME = {
    "EXAMPLES": "kit",
    "Failure": "subject",
    "ProbeFailure": "probe",
    "Reference": "reference",
    "Report": "parity_rows",
    "Row": "parity_rows",
    "Spy": "spy",
    "check_probe": "probe",
    "replay": "kit",
    "run": "kit",
    "run_by_name": "kit",
}

__all__ = [
    "EXAMPLES",
    "Failure",
    "ProbeFailure",
    "Reference",
    "Report",
    "Row",
    "Spy",
    "check_probe",
    "replay",
    "run",
    "run_by_name",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hal.testing' has no attribute '{name}'")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
