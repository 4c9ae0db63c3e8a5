"""`hal doctor`: one small call per op and backend, forward and backward, against the float64 reference.

Every line is PASS or ran, or the reason and a remedy, and each backend ends with the next step. A backend that cannot
run here is reported with its reason. Exit code 1 if the backend named with --backend has a failure.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import hal.ops  # noqa: F401  (defines the ops)
from hal.core.backend import Backend, Impl
from hal.core.op import OPS, Sample, TensorSpec
from hal.core.registry import backend_names, load, make, probed
from hal.errors import HalError
from hal.testing.aten_ops import check_aten
from hal.testing.checks import check_sample
from hal.testing.subject import Failure, Subject

from .arguments import Parser, options, parser_of_backends


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    status: PASS; ran (one small call of an op, which agreed with the reference: the kit compares more); FAIL; absent
    (cannot run here); none (no implementation); parts (a composite op without an implementation, some of whose parts
    are missing); or refused.
    """

    status: str
    subject: str
    detail: str = ""
    help: str = ""

    def __str__(self) -> str:
        lines = [f"  {self.status:<8}{self.subject + ' ':<22}{self.detail}".rstrip()]
        if self.help:
            lines.append(f"          what would help: {self.help}")
        return "\n".join(lines)


def parser() -> Parser:
    """The options of `hal doctor`."""
    return parser_of_backends("doctor", "One small call per op and backend: PASS, or the reason and a remedy.")


def main(argv: Sequence[str]) -> int:
    """Runs `hal doctor` with these arguments."""
    command_parser = parser()
    arguments = command_parser.parse_args(argv)
    if arguments.simulate and not arguments.backend:
        command_parser.error("--simulate needs --backend NAME")
    if arguments.backend is not None:
        return 0 if _examine(arguments.backend, options(arguments)) else 1
    for name in backend_names():
        _examine(name, {})
    for line in account(os.geteuid(), _umask()):
        print(line)
    return 0


def account(user: int, umask: int) -> Iterator[str]:
    """Warnings about the user id and the umask with which HAL runs.

    HAL sets the modes of the files that it writes itself (0640, folders 0750); scripts and other programs do not.
    """
    if user == 0:
        yield "account: this is root; a user without its privileges is enough for everything that HAL does"
    if umask & 0o027 != 0o027:
        yield f"account: umask {umask:03o} lets others read or change what scripts write; umask 027 does not"


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _examine(name: str, given: dict[str, object]) -> bool:
    """Prints the findings about one backend; True if none of them is a failure."""
    if name not in backend_names():
        load(name)  # raises an error that lists the names
    print(f"{name} ({_source(name)})" + (", on its simulator" if given else ""), flush=True)
    findings = []
    for finding in diagnose(name, given):
        print(finding, flush=True)
        findings.append(finding)
    print(f"  next: {_next(name, bool(given), findings)}", flush=True)
    return not any(f.status in ("FAIL", "absent") for f in findings)


def _next(name: str, simulated: bool, findings: Sequence[Finding]) -> str:
    """The next step: correct the first failure; then implement a missing op; then use the backend."""
    chosen = f"--backend {name}{' --simulate' * simulated}"
    wrong = [f for f in findings if f.status in ("FAIL", "absent")]
    missing = [f for f in findings if f.status == "none"]
    if wrong:
        return f"{wrong[0].help or 'correct what the line above names'}; then hal doctor {chosen} again"
    if missing:
        return (
            f"hal parity {chosen} --todo lists the {len(missing)} missing ops to write first; "
            f"until then --fallback reference runs them, slowly"
        )
    return f"hal parity {chosen} runs the whole conformance kit; hal train {chosen} trains"


def diagnose(name: str, given: dict[str, object]) -> Iterator[Finding]:
    """The findings about the backend `name`, in the order in which a user has to correct them."""
    try:
        backend = make(name, given)
    except HalError as error:
        yield Finding("FAIL", "load", str(error), "install, update or uninstall the package that the message names")
        return
    except Exception as error:
        yield Finding(
            "FAIL", "load", f"{type(error).__name__}: {error}", f"report this to the authors of {_source(name)}"
        )
        return
    try:
        probe = probed(backend)
    except HalError as error:
        yield Finding("FAIL", "probe", str(error), f"report this to the authors of {_source(name)}")
        return
    if not probe.ok:
        can_simulate = not given and "simulate" in inspect.signature(type(backend)).parameters and _simulates(name)
        simulator = f", or without the device: hal doctor --backend {name} --simulate" if can_simulate else ""
        yield Finding("absent", "probe", probe.reason, f"install what is named above{simulator}")
        return
    yield Finding("PASS", "probe", probe.reason)
    try:
        backend.build()
        device = backend.device(0)
        if not isinstance(device, torch.device):
            raise TypeError(f"device(0) returned {device!r}; it must return a torch.device")
        torch.empty(1, device=device)
    except Exception as error:
        yield Finding(
            "FAIL", "device", f"{type(error).__name__}: {error}", f"hal info --backend {name} shows what is installed"
        )
        return
    yield Finding("PASS", "device", str(device))
    yield from _torch_on_device(backend)
    for op in OPS.values():
        yield _op(backend, op.name)


def _torch_on_device(backend: Backend) -> Iterator[Finding]:
    """The operations of torch itself that training needs on the device."""
    findings = check_aten(backend)
    for finding in findings:
        if not finding.ok:
            yield Finding("FAIL", "torch", f"{finding.name}: {finding.error}", "the device's integration of torch")
    good = sum(finding.ok for finding in findings)
    yield Finding("PASS" if good == len(findings) else "FAIL", "torch", f"{good} of {len(findings)} operations")


def _simulates(name: str) -> bool:
    try:
        return probed(make(name, {"simulate": True})).ok
    except Exception:
        return False


def _source(name: str) -> str:
    return backend_names().get(name, "the backend")


def _op(backend: Backend, op_name: str) -> Finding:
    op = OPS[op_name]
    impls = backend.implementations(op)
    if not impls:
        return Finding("none", op_name, "no implementation")
    dtypes = [d for d in (torch.float32, torch.bfloat16, torch.float16) if d in op.tol]
    reasons: list[str] = []
    for impl in impls:
        for dtype in dtypes:
            for sample in _tiny(op_name)[:4]:
                try:
                    declined = _call(backend, impl, dtype, sample)
                except Failure as failure:
                    command = f"hal parity --backend {backend.name}{' --simulate' * backend.simulated} --op {op_name}"
                    return Finding("FAIL", op_name, f"{impl.id}: {failure.message}", f"{command} shows the call")
                if not declined:
                    return Finding("ran", op_name, f"{impl.id}, one call in {str(dtype).removeprefix('torch.')}")
                reasons += [f"{impl.id}: {r}" for r in declined if f"{impl.id}: {r}" not in reasons]
    missing = [part.name for part in op.parts if not backend.implementations(part)]
    if missing and impls[0].composed:
        return Finding("parts", op_name, f"composed of other ops, of which the backend lacks {', '.join(missing)}")
    return Finding("refused", op_name, "; ".join(reasons), f"hal why {op_name} --backend {backend.name}")


def _call(backend: Backend, impl: Impl, dtype: torch.dtype, sample: Sample) -> tuple[str, ...]:
    with Subject(backend, impl, dtype) as subject:
        return check_sample(subject, sample).declined


def _tiny(op_name: str) -> list[Sample]:
    """The op's edge cases that have a gradient and no empty tensor; the first ones are the simplest."""

    def full(value: object) -> bool:
        return (
            all(map(full, value))
            if isinstance(value, list)
            else not (isinstance(value, TensorSpec) and 0 in value.shape)
        )

    return [s for s in OPS[op_name].edge_cases() if s.grad and all(map(full, (*s.args, *s.kwargs.values())))]
