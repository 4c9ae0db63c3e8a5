"""The registry of backends: three in-tree names and the entry-point group `hal.backends`.

A backend's code is imported only when its name is used, so that a broken plug-in does not affect other backends. A name
that two distributions register is an error for that name only.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from ..errors import BackendNotFound, BackendUnavailable, HalError, PluginError
from .backend import API, Backend, Probe

GROUP = "hal.backends"

IN_TREE = {
    "cpu_ref": "hal.backends.cpu_ref:CpuRef",
    "cuda": "hal.backends.cuda:Cuda",
    "npu": "hal.backends.npu:Npu",
}


def _plugins() -> dict[str, list[EntryPoint]]:
    """The entry points of the group by backend name, without exact duplicates."""
    plugins: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=GROUP):
        same_name = plugins.setdefault(entry.name, [])
        if all((e.value, _dist(e)) != (entry.value, _dist(entry)) for e in same_name):
            same_name.append(entry)
    return plugins


def _dist(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unnamed distribution"


def backend_names() -> dict[str, str]:
    """Every backend name and where it comes from ("in-tree", or the distribution). Imports no backend."""
    result = dict.fromkeys(IN_TREE, "in-tree")
    for name, entries in sorted(_plugins().items()):
        sources = [_dist(e) for e in entries]
        if name in IN_TREE:
            sources.insert(0, "in-tree")
        result[name] = " and ".join(sources)
    return result


def load(name: str) -> type[Backend]:
    """The backend class called `name`, imported now.

    Raises BackendNotFound (with the names that exist) or PluginError (naming the distribution).
    """
    plugins = _plugins().get(name, [])
    if name not in IN_TREE and not plugins:
        # A name that continues the given one ("cpu" -> "cpu_ref") is closer than one with the same letters ("npu").
        close = [known for known in backend_names() if known.startswith(name)] if name else []
        close = close or difflib.get_close_matches(name, backend_names(), n=1)
        hint = f" Did you mean '{close[0]}'?" if close else ""
        raise BackendNotFound(
            f"no backend is called '{name}'; available: {', '.join(backend_names())}.{hint} "
            f"A package adds one through the entry-point group '{GROUP}'."
        )
    if len(plugins) + (name in IN_TREE) > 1:
        raise PluginError(
            f"the backend name '{name}' is registered by {backend_names()[name]}; uninstall all but one of them"
        )
    source = _dist(plugins[0]) if plugins else "in-tree"
    target = plugins[0].value if plugins else IN_TREE[name]
    module, _, attribute = target.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"the backend '{name}' ({source}, {target}) cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Backend)):
        raise PluginError(f"the backend '{name}' ({source}): {target} is {cls!r}, not a subclass of hal.Backend")
    if getattr(cls, "name", None) != name:
        raise PluginError(f"the backend '{name}' ({source}): its class has name = {getattr(cls, 'name', None)!r}")
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(cls.__abstractmethods__))
        raise PluginError(f"the backend '{name}' ({source}): {target} lacks the methods every backend has: {missing}")
    if plugins and not any("api" in vars(c) for c in cls.__mro__[: cls.__mro__.index(Backend)]):
        raise PluginError(
            f"the backend '{name}' ({source}) does not declare the contract it is written for; its class needs "
            f"`api = {API}` (or the number it was tested with)"
        )
    if cls.api != API:
        raise PluginError(
            f"the backend '{name}' ({source}) is written for api {cls.api!r}; this HAL accepts {API}. "
            f"Install a version of it (or of torch-hal) whose numbers match."
        )
    return cls


def make(name: str, options: Mapping[str, object] | None = None, *, deterministic: bool = False) -> Backend:
    """An instance of the backend `name`, neither probed nor built.

    deterministic: equal calls give equal bits; sets the option of that name if the constructor has it.

    Raises what `load` raises, HalError for an option that its constructor does not take, or BackendUnavailable if equal
    calls may give different bits although `deterministic` was requested.
    """
    cls = load(name)
    given = dict(options or {})
    if deterministic and "deterministic" in inspect.signature(cls).parameters:
        given["deterministic"] = True
    try:
        inspect.signature(cls).bind(**given)
    except TypeError as error:
        takes = ", ".join(inspect.signature(cls).parameters) or "none"
        raise HalError(f"backend '{name}' does not take these options ({given}): {error}; it takes: {takes}") from None
    backend = cls(**given)
    if deterministic and not backend.capabilities().deterministic:
        raise BackendUnavailable(
            f"backend '{name}' has no deterministic mode: equal calls may give different bits on its devices "
            "(capability deterministic); run without that mode, or choose another backend"
        )
    return backend


def probed(backend: Backend) -> Probe:
    """The result of the backend's probe. Raises PluginError, which names its distribution, if the probe is broken."""
    try:
        probe = backend.probe()
    except Exception as error:
        raise _bad_probe(backend, f"raised {type(error).__name__}: {error}") from error
    if not isinstance(probe, Probe):
        raise _bad_probe(backend, f"returned {probe!r}")
    return probe


def _bad_probe(backend: Backend, what: str) -> PluginError:
    source = backend_names().get(backend.name, "not registered")
    return PluginError(
        f"the backend '{backend.name}' ({source}): its probe() {what}; it must return a hal.Probe and never raise. "
        f"Tell its authors"
    )
