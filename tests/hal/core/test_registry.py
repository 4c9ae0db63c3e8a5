"""Discovery: three in-tree names, one entry-point group, and plug-ins whose failures affect only themselves."""

import sys
from importlib.metadata import EntryPoint

import host_backend
import pytest

import hal
from hal.core import registry

GOOD = f"""{host_backend.SOURCE}import hal.ops

class Acme(HostBackend):
    name = "acme"
    api = 2
    def __init__(self, lanes: int = 4):
        self.lanes = lanes
"""


class Dist:
    version = "1.0"

    def __init__(self, name):
        self.name = name
        self.metadata = {"Name": name}


@pytest.fixture
def install(isolated, tmp_path, monkeypatch):
    """install(source, name="acme", dist="hal-acme") registers a plug-in written in source."""
    entries = []
    monkeypatch.setattr(registry, "entry_points", lambda group: list(entries) if group == "hal.backends" else [])
    monkeypatch.syspath_prepend(tmp_path)
    modules = []

    def add(source, name="acme", dist="hal-acme", attribute="Acme"):
        module = f"plugin_{len(entries)}_{name}"
        (tmp_path / f"{module}.py").write_text(source)
        modules.append(module)
        entry = EntryPoint(name, f"{module}:{attribute}", "hal.backends")
        vars(entry)["dist"] = Dist(dist)
        entries.append(entry)
        return module

    yield add
    for module in modules:
        sys.modules.pop(module, None)


def test_the_in_tree_names_are_there_and_nothing_is_imported(install):
    module = install(GOOD)
    assert registry.backend_names() == {
        "cpu_ref": "in-tree",
        "cuda": "in-tree",
        "npu": "in-tree",
        "acme": "hal-acme 1.0",
    }
    assert module not in sys.modules


def test_a_plug_in_is_loaded_when_its_name_is_asked_for(install):
    module = install(GOOD)
    assert registry.load("acme").name == "acme"
    assert module in sys.modules
    assert hal.use("acme", lanes=2).lanes == 2 and registry.make("acme").lanes == 4


def test_an_unknown_name_lists_the_names_and_a_near_miss(install):
    install(GOOD)
    with pytest.raises(hal.BackendNotFound, match=r"'acne'; available: cpu_ref, cuda, npu, acme\. Did you mean 'acme'"):
        registry.load("acne")
    with pytest.raises(hal.BackendNotFound, match="Did you mean 'cpu_ref'"):
        registry.load("cpu")


@pytest.mark.parametrize(
    "source, message",
    [
        ("import no_such_package", r"hal-acme 1\.0.*cannot be imported: ModuleNotFoundError"),
        ("1 / 0", "cannot be imported: ZeroDivisionError"),
        ("Acme = 5", "is 5, not a subclass of hal.Backend"),
        (GOOD.replace('"acme"', '"emca"'), "its class has name = 'emca'"),
        (GOOD.replace("api = 2", ""), r"hal-acme 1\.0\) does not declare the contract"),
        (GOOD.replace("api = 2", "api = 99"), rf"api 99; this HAL accepts {hal.API}"),
        (GOOD.replace("api = 2", f"api = {hal.API - 1}"), f"this HAL accepts {hal.API}"),
        (GOOD.replace("api = 2", 'api = "2"'), r"hal-acme 1\.0\) is written for api '2'"),
        (GOOD.replace("def comm", "def communicator"), r"hal-acme 1\.0\).*lacks the methods every backend has: comm"),
        ("raise SystemExit(3)", r"hal-acme 1\.0.*cannot be imported: SystemExit: 3"),
        (
            GOOD + "\n@Acme.impl(hal.ops.swiglu, id='x')\ndef swiglu(y): ...\n",
            r"hal-acme 1\.0.*must have the signature of the reference",
        ),
    ],
    ids=[
        "import error",
        "exception",
        "not a backend",
        "another name",
        "no api",
        "another api",
        "an api too old",
        "an api of another type",
        "a method is missing",
        "an exit",
        "another signature",
    ],
)
def test_a_broken_plug_in_is_named_and_breaks_no_other(install, source, message):
    install(source)
    install(GOOD.replace("acme", "healthy"), name="healthy", dist="hal-healthy")
    with pytest.raises(hal.PluginError, match=message):
        registry.load("acme")
    assert registry.load("healthy").name == "healthy"


def test_commands_show_a_broken_plug_in_and_go_on_to_the_next(install, monkeypatch, capsys):
    from hal.cli import main

    monkeypatch.setattr(registry, "IN_TREE", {})
    install("1 / 0", name="a_broken", dist="hal-broken")
    install(GOOD.replace("acme", "b_raising").replace("self.lanes = lanes", "1 / 0"), name="b_raising", dist="hal-b")
    install(GOOD.replace("acme", "healthy"), name="healthy", dist="hal-healthy")
    for command in ("info", "doctor"):
        assert main([command]) == 0
        out = capsys.readouterr().out
        assert "hal-broken 1.0" in out
        assert out.count("ZeroDivisionError") == 2
        assert "the CPU" in out


def test_a_name_registered_twice_is_an_error_for_that_name_alone(install):
    install(GOOD, dist="hal-acme")
    install(GOOD, dist="acme-hal")
    install(GOOD, name="cuda", dist="cuda-too")
    assert registry.backend_names()["acme"] == "hal-acme 1.0 and acme-hal 1.0"
    with pytest.raises(hal.PluginError, match=r"registered by hal-acme 1\.0 and acme-hal 1\.0; uninstall all but one"):
        registry.load("acme")
    with pytest.raises(hal.PluginError, match="registered by in-tree and cuda-too"):
        registry.load("cuda")
    assert registry.load("cpu_ref").name == "cpu_ref"


def test_one_distribution_seen_twice_is_no_duplicate(install, monkeypatch):
    # An editable install and the source tree on sys.path list the same metadata twice.
    install(GOOD)
    (entry,) = registry.entry_points(group="hal.backends")
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry, entry])
    assert registry.load("acme").name == "acme"


def test_options_the_constructor_does_not_take_are_refused_with_those_it_takes(install):
    install(GOOD)
    with pytest.raises(hal.HalError, match=r"'simulate'.*it takes: lanes"):
        registry.make("acme", {"simulate": True})


def test_a_type_error_of_the_constructor_itself_is_not_hidden(install):
    install(GOOD.replace("self.lanes = lanes", "raise TypeError('inside')"))
    with pytest.raises(TypeError, match="inside"):
        registry.make("acme")


@pytest.mark.parametrize("body, message", [("return 5", "returned 5"), ("1 / 0", "raised ZeroDivisionError")])
def test_a_broken_probe_names_its_distribution_and_hides_nobody(install, monkeypatch, capsys, body, message):
    from hal.cli import main

    monkeypatch.setattr(registry, "IN_TREE", {})
    install(GOOD.replace('return hal.Probe(True, 1, "the CPU")', body), dist="hal-acme")
    install(GOOD.replace("acme", "healthy"), name="healthy", dist="hal-healthy")
    with pytest.raises(hal.PluginError, match=rf"'acme' \(hal-acme 1\.0\): its probe\(\) {message}"):
        hal.use("acme")
    for command in ("info", "doctor"):
        main([command])
        out = capsys.readouterr().out
        assert message in out and "the CPU" in out
