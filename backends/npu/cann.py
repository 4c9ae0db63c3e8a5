"""The release of the installed CANN, and the vendor's table of the releases of torch_npu that go with it.

A pair that is not in the table (compatibility.csv) loads, and then fails at the first operator whose interface differs
(a missing aclnn symbol, an error 561103), so `probe` refuses it and names what goes together.
"""

from __future__ import annotations

import csv
import functools
import platform
import re
from pathlib import Path

TABLE = Path(__file__).with_name("compatibility.csv")


@functools.cache
def pairs() -> tuple[tuple[str, str], ...]:
    """(release of torch_npu, release of CANN), as the vendor publishes them."""
    lines = [line for line in TABLE.read_text().splitlines() if line and not line.startswith("#")]
    return tuple((row["torch_npu"], row["cann"]) for row in csv.DictReader(lines))


def release_of(library_directory: str) -> str | None:
    """The release of the CANN whose libascendcl.so is in this directory, such as "8.3.RC1"; None if it does not say.

    CANN writes it as `version=` into ascend_toolkit_install.info (ascend_nnae_install.info, ...), in the folder of the
    processor, which is where torch_npu's collect_env looks as well.
    """
    folder = Path(library_directory).resolve()
    for root in (folder.parent, folder.parent / f"{platform.machine()}-linux", folder.parent.parent):
        for path in sorted(root.glob("ascend_*_install.info")):
            found = re.search(r"^version\s*=\s*(\S+)", path.read_text(errors="replace"), re.MULTILINE)
            if found:
                return found[1]
    return None


def mismatch(torch_npu: str, cann: str) -> str:
    """Why this release of torch_npu does not go with this CANN, and what does; "" if it does or the table is older.

    Releases of torch_npu or CANN that are newer than the table are accepted: it cannot exclude them.
    """
    version, cann = torch_npu.split("+")[0], _base(cann)
    rows = [(npu, _base(of)) for npu, of in pairs()]
    if (version, cann) in rows:
        return ""
    if _order(version) > max(_order(npu) for npu, _ in rows) or _order(cann) > max(_order(of) for _, of in rows):
        return ""
    wanted = sorted({of for npu, of in rows if npu == version}, key=_order)
    fitting = [npu for npu, of in rows if of == cann]
    if not wanted and not fitting:
        return ""  # neither is in the table, such as a nightly build with an alpha of CANN
    needs = (
        f"torch_npu {version} needs CANN {' or '.join(wanted)}" if wanted else f"torch_npu {version} is not for CANN"
    )
    takes = f"; with CANN {cann} install torch-npu {' or '.join(fitting)}" if fitting else ""
    return f"{needs}, and CANN {cann} is installed{takes} (the vendor's COMPATIBILITY.md)"


def _base(cann: str) -> str:
    """A release without what follows its number: "8.3.RC1.alpha003" is of 8.3.RC1, "8.5.0" is itself."""
    found = re.match(r"(\d+\.\d+\.(?:RC)?\d+)", cann, re.IGNORECASE)
    return found[1].upper() if found else cann


def _order(version: str) -> tuple[int, ...]:
    """A key that orders releases: an RC comes before its release, a post release after it."""
    numbers = []
    for part in version.upper().split("."):
        digits = int(re.sub(r"\D", "", part) or 0)
        numbers.append(digits - 1000 if "RC" in part else digits)
    return tuple(numbers)
