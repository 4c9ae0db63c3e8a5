"""The kit under pytest: `pytest --pyargs hal.testing --backend NAME [--simulate] [--op OP] [--max-examples N]`.

pytest loads this module in every session where HAL is installed (entry point pytest11), because options cannot come
from the conftest of a package named with --pyargs. So it imports no more than hal itself, and adds its options only to
sessions whose arguments name hal.testing, so that they cannot collide with the options of other projects.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hal.errors import HalError

if TYPE_CHECKING:
    from .parity_rows import Row

_BACKEND = pytest.StashKey[Any]()
_ASKED = pytest.StashKey[bool]()
_PROBE = pytest.StashKey["Row"]()
_ROWS = pytest.StashKey["list[Row]"]()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser, args: list[str]) -> None:
    if not any(_names_the_kit(a, early_config.invocation_params.dir) for a in args):
        return
    early_config.stash[_ASKED] = True
    group = parser.getgroup("hal", "HAL conformance kit")
    group.addoption("--backend", metavar="NAME", default=os.environ.get("HAL_BACKEND"), help="backend under test")
    group.addoption("--simulate", action="store_true", help="run the backend on its simulator")
    group.addoption("--op", action="append", metavar="OP", help="only this op; may be given several times")
    group.addoption("--max-examples", type=int, default=None, metavar="N", help="random calls per dtype")


def _names_the_kit(argument: str, folder: Path) -> bool:
    """Whether a command-line argument is `hal.testing` (for --pyargs) or a path into the installed package.

    Another folder called hal/testing, such as the one of this package's own tests, is not the kit.
    """
    name = argument.split("::")[0]
    return name.startswith("hal.testing") or (folder / name).resolve().is_relative_to(Path(__file__).resolve().parent)


def pytest_configure(config: pytest.Config) -> None:
    if _ASKED not in config.stash:
        return
    import hal

    from . import kit

    name = config.getoption("--backend")
    if not name:
        raise pytest.UsageError(f"no backend was named; give --backend NAME, one of: {', '.join(hal.backend_names())}")
    options: dict[str, Any] = {"simulate": True} if config.getoption("--simulate") else {}
    try:
        kit.chosen_ops(config.getoption("--op"))
        probe = kit.probe_row(name, options)
        backend = hal.use(name, **options)
    except HalError as error:
        raise pytest.UsageError(str(error)) from None
    probe.simulated = backend.simulated
    config.stash[_BACKEND], config.stash[_PROBE], config.stash[_ROWS] = backend, probe, []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "hal_case" not in metafunc.fixturenames:
        return
    from . import kit
    from .device_checks import DEVICE, check_device
    from .golden import check_golden
    from .lowering import check_lowered

    config = metafunc.config
    if _BACKEND not in config.stash:
        raise pytest.UsageError("run the kit as: pytest --pyargs hal.testing --backend NAME")
    backend, probe = config.stash[_BACKEND], config.stash[_PROBE]
    names, count = config.getoption("--op"), config.getoption("--max-examples")
    effort = kit.Effort(kit.EXAMPLES if count is None else count)
    cases: list[Any] = [pytest.param(lambda: [probe], id="probe")]
    for op in kit.chosen_ops(names):
        impls = backend.implementations(op)
        if not impls:
            cases.append(pytest.param(lambda o=op: kit.check_op(backend, o), id=op.name))
        for impl in impls:
            cases.append(
                pytest.param(lambda i=impl: kit.check_implementation(backend, i, effort), id=f"{op.name}-{impl.id}")
            )
        if impls:
            cases.append(pytest.param(lambda o=op: [check_lowered(backend, o)], id=f"{op.name}-lowered"))
    if names is None or DEVICE in names:
        cases.append(pytest.param(lambda: check_device(backend), id=DEVICE))
    if names is None or kit.GOLDEN in names:
        cases.append(pytest.param(lambda: check_golden(backend), id=kit.GOLDEN))
    metafunc.parametrize("hal_case", cases)


@pytest.fixture
def hal_rows(request: pytest.FixtureRequest) -> list[Row]:
    """The rows of the session, to which each test of the kit adds its own for the summary."""
    return request.config.stash[_ROWS]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash.get(_ROWS, [])
    if rows:
        from .parity_rows import Report

        terminalreporter.section("HAL conformance")
        for row in rows:
            if row.status in ("declined", "waived"):
                terminalreporter.write_line(str(row))
        terminalreporter.write_line(Report(rows[0].backend, rows[0].simulated, rows).summary())
