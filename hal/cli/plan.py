"""`hal plan`: the layouts of a model that fit on N devices, with their memory, traffic and estimated speed.

Runs no model and uses no device: the formulas use the data sheet of an accelerator that the backend lists. The layouts
are those that `hal train` accepts. Options of `hal train` that are given are fixed; the others are varied.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hal.core.device_spec import DeviceSpec
from hal.core.registry import load, make
from hal.errors import HalError

from .arguments import Parser, add_backend, require_writable

if TYPE_CHECKING:
    from hal.model.config.schema import Config

_UNITS = {
    "memory": ("--device-memory", "GiB", 2.0**30),
    "memory_bandwidth": ("--memory-bandwidth", "GB/s", 1e9),
    "node_link": ("--node-link", "GB/s", 1e9),
    "network": ("--network", "GB/s", 1e9),
}

_IMBALANCE = 1.2
"""Rows of the busiest device over the mean that is planned for by default: an assumption about routers that
are trained with a balancing loss, not a measurement; docs/scaling.md."""


def main(argv: Sequence[str]) -> int:
    """Exit code 1 if no layout fits."""
    from hal.model.apps.planning import plan_report
    from hal.model.apps.planning.search import require_some, search, set_vocabulary
    from hal.model.config.command_line import build, read
    from hal.model.config.validation import check_model

    command = parser()
    arguments, rest = command.parse_known_args(argv)
    if arguments.simulate:
        command.error("--simulate has no effect: hal plan runs nothing")
    if arguments.devices < 1:
        command.error(f"--devices must be 1 or more, got {arguments.devices}")
    if arguments.top < 1:
        command.error(f"--top must be 1 or more, got {arguments.top}")
    if not 0.0 <= arguments.headroom < 1.0:
        command.error(f"--headroom is a fraction of the memory, at least 0 and below 1; got {arguments.headroom}")
    require_writable("--json", None if arguments.json == "-" else arguments.json)
    device = _device(arguments)
    values = read(rest, showing=True)
    for name in ("ddp_bucket_size", "overlap_grad_reduce"):  # files have them for every layout
        if values.origins.get(name, "command line") != "command line":
            values.pop(name, None)
    config = build(values, check_model)
    imbalance = _imbalance(arguments.expert_imbalance, config)
    set_vocabulary(config)
    limit = device.memory * (1.0 - arguments.headroom)
    capabilities = make(arguments.backend).capabilities()
    result = search(config, arguments.devices, device, limit, capabilities, imbalance)
    require_some(result, arguments.devices)
    shown = plan_report.text(result, config, arguments.devices, device, limit, arguments.top, imbalance)
    print(shown, file=sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.json:
        record = plan_report.record(result, config, arguments.devices, device, limit, imbalance)
        content = json.dumps(record, indent=1) + "\n"
        sys.stdout.write(content) if arguments.json == "-" else Path(arguments.json).write_text(content)
    return 0 if result.fits else 1


def parser() -> Parser:
    """The options of `hal plan` itself; it also accepts those of `hal train`."""
    command = Parser(
        "plan",
        description=__doc__,
        epilog="Options of `hal train` describe the model (--config NAME is a ready one) and fix parts of the layout.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_backend(command, required=True)
    add = command.add_argument
    add("--devices", type=int, required=True, metavar="N", help="number of devices")
    add("--accelerator", metavar="NAME", help="accelerator, one of those that the backend lists (default: the first)")
    for name, (flag, unit, _) in _UNITS.items():
        add(flag, type=float, metavar=unit, dest=name, help=f"instead of the accelerator's {name.replace('_', ' ')}")
    add("--device-flops", type=float, metavar="TFLOP/s", help="instead of the accelerator's peak in the model's dtype")
    add("--devices-per-node", type=int, metavar="N", help="instead of the accelerator's devices per machine")
    add(
        "--headroom",
        type=float,
        default=0.1,
        metavar="FRACTION",
        help="fraction of memory reserved for other uses (default 0.1)",
    )
    add(
        "--expert-imbalance",
        type=float,
        metavar="FACTOR",
        help=f"rows of the experts on the device that has the most, in multiples of the mean (default {_IMBALANCE})",
    )
    add("--top", type=int, default=20, metavar="N", help="number of layouts to show (default 20)")
    add("--json", metavar="FILE", help="also write all layouts to FILE; - is the standard output")
    return command


def _imbalance(given: float | None, config: Config) -> float:
    """The imbalance to plan for. Raises HalError for a value that cannot be, or for a model without experts."""
    if given is None:
        return _IMBALANCE
    if config.num_experts is None:
        raise HalError("--expert-imbalance has no effect without --num-experts")
    if not 1.0 <= given <= config.num_experts:
        raise HalError(f"--expert-imbalance is a factor from 1 to the {config.num_experts} experts, got {given:g}")
    return given


def _device(arguments: argparse.Namespace) -> DeviceSpec:
    """The selected accelerator, with its figures replaced by those given on the command line."""
    known = {a.name: a for a in load(arguments.backend).device_specs}
    given = {name: getattr(arguments, name) for name in _UNITS if getattr(arguments, name) is not None}
    figures = {_UNITS[name][0]: value for name, value in given.items()}
    figures |= {"--device-flops": arguments.device_flops, "--devices-per-node": arguments.devices_per_node}
    for flag, value in figures.items():
        if value is not None and not 0 < value < math.inf:
            raise HalError(f"{flag} must be above 0 and finite, got {value:g}")
    names = ", ".join(known) or "none"
    if arguments.accelerator is not None and arguments.accelerator not in known:
        raise HalError(
            f"backend '{arguments.backend}' knows no accelerator '{arguments.accelerator}'; it knows: {names}"
        )
    if known:
        device = known[arguments.accelerator] if arguments.accelerator else next(iter(known.values()))
    elif len(given) < len(_UNITS) or arguments.device_flops is None or arguments.devices_per_node is None:
        flags = ", ".join([*(flag for flag, _, _ in _UNITS.values()), "--device-flops", "--devices-per-node"])
        raise HalError(f"backend '{arguments.backend}' lists no devices; describe the device with {flags}")
    else:
        device = DeviceSpec("device", 0.0, {}, 0.0, 0.0, 0.0, 1, "given on the command line")
    changes = {name: value * _UNITS[name][2] for name, value in given.items()}
    if arguments.device_flops is not None:
        peak = arguments.device_flops * 1e12
        device = replace(device, flops={"bf16": peak, "fp16": peak, "fp32": peak})
    if arguments.devices_per_node is not None:
        device = replace(device, per_node=arguments.devices_per_node)
    changed = [_UNITS[n][0] for n in changes]
    source = device.source + (f"; changed: {', '.join(changed)}" if changed and known else "")
    return replace(device, **changes, source=source)
