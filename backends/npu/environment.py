"""Probes this machine for the npu backend, without importing torch_npu and without touching a device.

`look` gives one precise reason: torch_npu missing or for another torch, CANN missing, a driver without devices, or
ready. `variables` lists the environment variables that affect Ascend software, with their values.
"""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import itertools
import os
import resource
from collections.abc import Mapping
from pathlib import Path

import torch

import hal

from . import cann as cann_release

VARIABLES: Mapping[str, str] = {
    "ASCEND_HOME_PATH": "where CANN is installed",
    "ASCEND_RT_VISIBLE_DEVICES": "the devices this process may use",
    "ASCEND_LAUNCH_BLOCKING": "1: every operator is waited for (debugging)",
    "TASK_QUEUE_ENABLE": "0, 1 (default), 2: how operators are queued to the device",
    "COMBINED_ENABLE": "1: chains of operators that change strides run as one",
    "JIT_COMPILE": "of megatron_npu's scripts; True: operators are compiled for every shape, False: those of CANN run",
    "high_precision": "of megatron_npu; HAL has pins instead: --pin flash_attention=npu/fusion_attention_low_precision",
    "INF_NAN_MODE_ENABLE": "1 (default on A2/A3): overflow gives inf; 0: it saturates and sets a flag",
    "INF_NAN_MODE_FORCE_DISABLE": "1: allows INF_NAN_MODE_ENABLE=0 on A2/A3, which torch_npu otherwise refuses",
    "PYTORCH_NPU_ALLOC_CONF": "the caching allocator's options",
    "HCCL_CONNECT_TIMEOUT": "seconds to set up a communicator (120)",
    "HCCL_EXEC_TIMEOUT": "seconds a collective may wait for its peers (1836)",
    "HCCL_EVENT_TIMEOUT": "seconds a stream may wait for an event (1868); more than HCCL_EXEC_TIMEOUT",
    "HCCL_BUFFSIZE": "MB of buffer per communicator",
    "P2P_HCCL_BUFFSIZE": "MB of buffer per point-to-point communicator (20)",
    "HCCL_WHITELIST_DISABLE": "1: no list of allowed peers",
    "HCCL_IF_IP": "the address for the control network",
    "HCCL_IF_BASE_PORT": "its first port",
    "HCCL_SOCKET_IFNAME": "its interface",
    "HCCL_SOCKET_FAMILY": "its address family",
    "HCCL_DETERMINISTIC": "true: reductions in one order",
    "HCCL_ALGO": "the collectives' algorithms",
    "HCCL_OP_EXPANSION_MODE": "where collectives are scheduled",
    "TORCH_HCCL_BLOCKING_WAIT": "1: Work.wait blocks and times out in the caller",
    "TORCH_HCCL_ASYNC_ERROR_HANDLING": "1 (default): a watchdog ends the process on a communication error",
    "RANK_TABLE_FILE": "a table of ranks, instead of negotiation",
    "ASCEND_GLOBAL_LOG_LEVEL": "0 debug to 4 none",
    "ASCEND_SLOG_PRINT_TO_STDOUT": "1: the log goes to the terminal",
    "ACL_OP_COMPILER_CACHE_DIR": "where compiled operators are kept",
    "ACL_OP_INIT_MODE": "when the older operator path starts",
    "TORCH_NPU_USE_COMPATIBLE_IMPL": "1: torch_npu follows torch where it differs by default (gelu, layer norm)",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1: Megatron's order of launches",
}


def variables() -> dict[str, str]:
    """The variables of VARIABLES that are set, with their values; part of `hal info --backend npu`."""
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def compiles_operators() -> bool | None:
    """The value of JIT_COMPILE, which sets torch_npu's compile mode; None if it is not set. Raises HalError."""
    text = os.environ.get("JIT_COMPILE")
    if text is None:
        return None
    if text.lower() not in ("true", "false", "1", "0"):
        raise hal.HalError(f"JIT_COMPILE is {text!r}; it must be True or False")
    return text.lower() in ("true", "1")


def limits() -> dict[str, str]:
    """The limits of this process that Ascend's environment scripts raise with `ulimit`; part of `hal info`."""
    kinds = {"open files": resource.RLIMIT_NOFILE, "core files": resource.RLIMIT_CORE}

    def shown(limit: int) -> str:
        return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)

    return {f"limit of {name}": " of ".join(map(shown, resource.getrlimit(kind))) for name, kind in kinds.items()}


def _wheel() -> tuple[str | None, str]:
    """(version of torch_npu or None, its problem); the latter is "" if the version matches this torch."""
    try:
        version = importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return None, "torch_npu is not installed; install it with: pip install 'torch-hal[npu]'"
    mine, its = (".".join(v.split("+")[0].split(".")[:2]) for v in (torch.__version__, version))
    if mine != its:
        return version, (
            f"torch_npu {version} is for torch {its}, and torch is {torch.__version__}; "
            f"install torch-npu=={mine}.* or torch=={its}.*"
        )
    return version, ""


def cann_libraries() -> str | None:
    """The directory in which the loader would find libascendcl.so."""
    roots = [os.environ.get("ASCEND_HOME_PATH"), os.environ.get("ASCEND_TOOLKIT_HOME")]
    directories = [f"{root}/lib64" for root in roots if root] + os.environ.get("LD_LIBRARY_PATH", "").split(":")
    return next((d for d in directories if d and (Path(d) / "libascendcl.so").exists()), None)


def _driver() -> bool:
    return Path("/dev/davinci_manager").exists()


def _devices() -> list[str]:
    """The /dev nodes of the NPUs that this process may use."""
    # Sorted by number, because that is the order in which ASCEND_RT_VISIBLE_DEVICES counts them.
    nodes = sorted(glob.glob("/dev/davinci[0-9]*"), key=lambda node: int(node.removeprefix("/dev/davinci")))
    return [nodes[i] for i in _visible(len(nodes))]


def _visible(count: int) -> list[int]:
    """The devices, of `count`, that this process may use: those listed, up to the first number that is none."""
    chosen = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if chosen is None:
        return list(range(count))
    listed = (int(part) if part.strip().isdigit() else count for part in chosen.split(","))
    return list(itertools.takewhile(lambda i: i < count, listed))


def look(simulated_devices: int | None) -> hal.Probe:
    """The result of `Backend.probe`; simulated_devices: number of devices of the simulator, None for hardware."""
    facts = {f"environment {name}": value for name, value in variables().items()} | limits()
    version, problem = _wheel()
    facts["torch_npu"] = version or "not installed"
    if problem:
        return hal.Probe(False, 0, problem, facts)
    if simulated_devices is not None:
        return _look_simulated(len(_visible(simulated_devices)), facts)
    cann, devices, driver = cann_libraries(), _devices(), _driver()
    facts |= {"cann": cann or "not found", "driver": "present" if driver else "not found", "devices": str(len(devices))}
    hint = "; without an NPU, simulate=True (--simulate) runs the same torch_npu over a simulated CANN"
    if cann is None:
        reason = (
            "CANN was not found (no libascendcl.so under ASCEND_HOME_PATH or LD_LIBRARY_PATH); source its set_env.sh"
        )
        return hal.Probe(False, 0, reason + hint, facts)
    if not devices:
        reason = (
            "the Ascend driver is present but shows no device" if driver else "no Ascend driver (/dev/davinci_manager)"
        )
        return hal.Probe(False, 0, reason + hint, facts)
    release = cann_release.release_of(cann)
    facts["cann release"] = release or "not found (no ascend_*_install.info)"
    wrong = cann_release.mismatch(version or "", release) if release else ""
    if wrong:
        return hal.Probe(False, 0, wrong + hint, facts)
    return hal.Probe(True, len(devices), f"{len(devices)} NPUs, torch_npu {version}, CANN in {cann}", facts)


def _look_simulated(devices: int, facts: dict[str, str]) -> hal.Probe:
    from .simulator import build

    try:
        facts |= {"compiler": build.find_compiler()[0], "simulator": "aclnn, AscendCL and HCCL on the CPU"}
        build.acl_headers()
    except hal.BackendUnavailable as error:
        return hal.Probe(False, 0, str(error), facts)
    reason = f"{devices} simulated Ascend910B3, torch_npu {facts['torch_npu']}"
    return hal.Probe(True, devices, reason, facts)
