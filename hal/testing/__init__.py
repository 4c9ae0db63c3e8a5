"""The conformance kit: what every backend must do, checked on yours.

`hal parity --backend NAME`, `pytest --pyargs hal.testing --backend NAME` and `hal.testing.run(backend)` are three ways
in; they share one engine (kit.py) and one tolerance rule (comparison.py).
"""

from .kit import EXAMPLES, replay, run, run_by_name
from .probe import ProbeFailure, check_probe
from .reference import Reference
from .report import Report, Row
from .spy import Spy
from .subject import Failure

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
