"""The files of `make gpu`: docs/verified/cuda-<device>.json, its page .md, and -verdict.md.

They are replaced by rename at every row, so that a killed process leaves complete files, and the part's next run
continues after the last finished unit.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, cast

from .gpu_report import PartRecord, Report, markdown
from .verdict import page

SAME = ("device", "torch", "CUDA")
"""What a report must have in common with a run to be extended by it. Its units name their sources."""


def path_of(folder: Path, device: str) -> Path:
    """The .json of a device's report."""
    return folder / f"cuda-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def pages_of(path: Path) -> tuple[Path, Path]:
    """The report's page and the verdict's."""
    return path.with_suffix(".md"), path.with_name(f"{path.stem}-verdict.md")


def load(path: Path) -> Report:
    """The report; raises OSError or ValueError if there is none that can be read."""
    return cast(Report, json.loads(path.read_text()))


def begin(path: Path, machine: dict[str, Any]) -> str:
    """Creates the report, or keeps an existing one of the same device and torch; returns a message about this."""
    kept: dict[str, PartRecord] = {}
    message = f"a new report, {path}"
    if path.exists():
        try:
            existing = load(path)
            if all(existing["machine"].get(k) == machine[k] for k in SAME):
                kept, message = existing["parts"], f"{path} is extended"
            else:
                message += " (it replaces one of another torch)"
        except (ValueError, KeyError, TypeError, AttributeError):
            message += " (it replaces a file that was not a report)"
    save(path, {"machine": machine, "parts": kept})
    return message


def save(path: Path, report: Report) -> None:
    """Writes the .json and the two pages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = (json.dumps(report, indent=1) + "\n", markdown(report), page(report))
    for file, text in zip((path, *pages_of(path)), texts):
        temporary = file.with_name(f"{file.name}.part{os.getpid()}")
        temporary.write_text(text)
        os.replace(temporary, file)
