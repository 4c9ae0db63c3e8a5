"""Which implementation runs: pin, then order of registration, then (if allowed) the reference, else an error."""

import decimal
import functools
import os
import subprocess
import sys

import pytest
import torch

import hal
from hal import ops
from hal.core import dispatch
from hal.core.signature import define, fragments


@pytest.fixture
def two(toy, make_backend):
    """A backend with two implementations: "a" accepts only scale 1, "b" no bias w."""
    backend = make_backend()

    def a_why(call):
        return [] if call.scale == 1.0 else [f"scale {call.scale} (only 1)"]

    def b_why(call):
        return [] if call.w is None else ["w is given", "w has a dtype"]

    backend.impl(toy, id="a", why_not=a_why)(lambda x, w=None, *, scale=1.0: x + 100)
    backend.impl(toy, id="b", why_not=b_why)(lambda x, w=None, *, scale=1.0: x + 200)
    return backend()


X = torch.zeros(2)
W = torch.ones(2)


def test_the_first_that_accepts_runs(toy, two):
    with hal.activated(two):
        assert toy(X)[0] == 100
        assert toy(X, scale=2.0)[0] == 200


@pytest.mark.parametrize("marked", [True, False])
def test_only_a_marked_why_not_is_asked_once_per_metadata(toy, make_backend, marked):
    backend, scales = make_backend(), []

    def why(call):
        scales.append(call.scale)
        return [] if call.scale == 1.0 else ["scale"]

    backend.impl(toy, id="a", why_not=hal.by_metadata(why) if marked else why)(lambda x, w=None, *, scale=1.0: x + 100)
    backend.impl(toy, id="b")(lambda x, w=None, *, scale=1.0: x + 200)
    with hal.activated(backend()):
        for _ in range(3):
            assert toy(X)[0] == 100
            assert toy(torch.zeros(2))[0] == 100
        assert scales == [1.0] if marked else len(scales) >= 6
        assert toy(torch.zeros(3))[0] == 100  # another shape needs another decision
        assert toy(X, scale=2.0)[0] == 200
        assert scales[-1] == 2.0
        backend.impl(toy, id="c")(lambda x, w=None, *, scale=1.0: x + 300)
        with hal.policy(pin={"toy": "c"}):
            assert toy(X)[0] == 300  # decisions are cached per policy
        assert toy(X)[0] == 100


def test_a_list_among_the_values_is_no_obstacle(make_backend):
    backend = make_backend()
    backend.impl(ops.philox_uniform, id="a")(lambda shape, rng, *, device=None: torch.zeros(*shape))
    with hal.activated(backend()):
        for shape in ([2, 3], [2, 3], torch.Size([2, 3]), range(2, 4)):
            assert ops.philox_uniform(shape, hal.Rng(1, 0)).shape == (2, 3)


def test_a_pin_is_the_only_candidate(toy, two):
    with hal.activated(two, pin={"toy": "b"}):
        assert toy(X)[0] == 200
        with pytest.raises(hal.UnsupportedOp, match="pinned to b"):
            toy(X, W)
    with hal.activated(two, pin={"toy": "reference"}):
        assert toy(X, W, scale=3.0)[0] == 3


def test_nobody_accepts_the_text_lists_every_reason_and_what_to_do(toy, two):
    with hal.activated(two), pytest.raises(hal.UnsupportedOp) as caught:
        toy(X, W, scale=2.0)
    text = str(caught.value)
    assert "toy on backend 'cpu_toy'" in text
    assert "a: refuses: scale 2.0 (only 1)" in text
    assert "b: refuses: w is given; w has a dtype" in text
    assert "fallback='reference'" in text


def test_an_op_without_implementation_says_so(toy, make_backend):
    with hal.activated(make_backend()()), pytest.raises(hal.UnsupportedOp, match="no implementation is registered"):
        toy(X)


def test_the_fallback_runs_the_reference_warns_once_and_counts(toy, two):
    with hal.activated(two, fallback="reference"):
        before = hal.fallbacks().get("toy", 0)
        with pytest.warns(RuntimeWarning, match="HAL fallback: toy runs its reference") as caught:
            assert toy(X, W, scale=2.0)[0] == 2
            assert toy(X, W, scale=3.0)[0] == 3
        assert len(caught) == 1
        assert hal.fallbacks()["toy"] == before + 2
        assert toy(X)[0] == 100  # accepted calls are not affected


def test_fallbacks_are_printed_at_exit():
    script = (
        "import torch, hal, hal.testing, warnings\n"
        "from hal import ops\n"
        "warnings.simplefilter('ignore')\n"
        "backend = hal.testing.Reference(); backend.impls = {}\n"
        "hal.activate(backend, fallback='reference')\n"
        "ops.rms_norm(torch.ones(2, 3), torch.ones(3)); ops.rms_norm(torch.ones(2, 3), torch.ones(3))\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "calls that ran the reference as a fallback: rms_norm x2" in result.stderr


def test_an_exception_inside_a_kernel_propagates_and_never_falls_back(toy, make_backend):
    backend = make_backend()

    def out_of_memory(x, w=None, *, scale=1.0):
        raise MemoryError("device")

    backend.impl(toy, id="a")(out_of_memory)
    backend.impl(toy, id="b")(toy.reference)
    with hal.activated(backend(), fallback="reference"), pytest.raises(MemoryError, match="device"):
        toy(X)
    assert "toy" not in hal.fallbacks()


def test_a_wrong_call_never_reaches_a_backend(toy, two):
    with hal.activated(two, fallback="reference"):
        for _ in range(2):  # accepted calls are cached, refused ones are not
            with pytest.raises(hal.ContractError, match="toy: expected a scale that is not 0; found 0"):
                toy(X, scale=0.0)
        with pytest.raises(hal.ContractError, match=r"scale: float; found str"):
            toy(torch.ones(3), scale="2")
        with pytest.raises(hal.ContractError, match=r"scale: float; found <class 'decimal.Decimal'>"):
            toy(torch.ones(3), scale=decimal.Decimal("0.5"))
        with pytest.raises(hal.ContractError, match=r"x: .*Tensor; found list"):
            toy([1.0])


def test_policy_changes_for_a_block_and_adds_pins(toy, two):
    with hal.activated(two, pin={"toy": "b"}):
        with hal.policy(fallback="reference"), pytest.warns(RuntimeWarning):
            assert toy(X, W)[0] == 1  # the pin still holds, so the fallback is used
        with hal.policy(pin={"toy": "a"}):
            assert toy(X)[0] == 100
        assert toy(X)[0] == 200
        with pytest.raises(hal.UnsupportedOp):
            toy(X, W)


def test_policy_is_restored_after_an_exception(toy, two):
    with hal.activated(two):
        with pytest.raises(RuntimeError), hal.policy(pin={"toy": "b"}):
            raise RuntimeError
        assert toy(X)[0] == 100


def test_switching_backends_switches_implementations(toy, two, make_backend):
    other = make_backend("other")
    other.impl(toy, id="c")(lambda x, w=None, *, scale=1.0: x + 300)
    with hal.activated(two):
        assert toy(X)[0] == 100
        with hal.activated(other()):
            assert toy(X)[0] == 300
            assert hal.backend().name == "other"
        assert toy(X)[0] == 100


def test_an_implementation_registered_later_is_seen(toy, make_backend):
    backend = make_backend()
    with hal.activated(backend()):
        with pytest.raises(hal.UnsupportedOp):
            toy(X)
        backend.impl(toy, id="late")(toy.reference)
        assert toy(X)[0] == 0


@pytest.mark.parametrize(
    "how, message",
    [
        ({"fallback": "silent"}, "unknown fallback policy 'silent'; choose one of error, reference"),
        ({"pin": {"toyy": "a"}}, "no op is called 'toyy'"),
        ({"pin": {"toy": "z"}}, "backend 'cpu_toy' has a, b, reference for this op"),
    ],
)
def test_wrong_policies_are_refused_at_once(toy, two, how, message):
    with pytest.raises(hal.HalError, match=message):
        hal.activate(two, **how)


def test_why_runs_nothing_and_takes_meta_tensors(toy, make_backend):
    backend = make_backend()

    def never(x, w=None, *, scale=1.0):
        raise AssertionError("why must not call")

    backend.impl(toy, id="a", why_not=lambda call: ["no"])(never)
    backend.impl(toy, id="b")(never)
    with hal.activated(backend()):
        answer = hal.why(toy, torch.empty(2, device="meta"))
        assert answer.chosen == "b"
        assert answer.reasons == {"a": ("no",), "b": ()}
        assert str(answer) == "toy on backend 'cpu_toy':\n  a: refuses: no\n  b: chosen"
        with pytest.raises(hal.ContractError):
            hal.why(toy, torch.empty(2, device="meta"), scale=0.0)


def _adding(value):
    def forward(x, w=None, *, scale=1.0):
        return x + value

    return forward


@pytest.mark.parametrize("marked", [True, False])
def test_a_backend_may_prefer_implementations_by_call(toy, make_backend, marked):
    backend = make_backend()
    why_not = hal.by_metadata(lambda call: ()) if marked else lambda call: ()
    for number, id in enumerate("abc"):
        refuses = hal.by_metadata(lambda call: ["no"]) if id == "c" else why_not
        backend.impl(toy, id=id, why_not=refuses)(_adding(100.0 * (number + 1)))
    backend.preference = lambda self, op: lambda call: ("c", "b") if call.scale > 1.0 else ()
    with hal.activated(backend()):
        for _ in range(2):
            assert toy(X)[0] == 100 and toy(X, scale=2.0)[0] == 200
        assert list(hal.why(toy, X, scale=2.0).reasons) == ["c", "b", "a"] and hal.why(toy, X).chosen == "a"
    with hal.activated(backend(), pin={"toy": "a"}):
        assert toy(X, scale=2.0)[0] == 100


def test_why_tells_a_fallback_from_a_refusal(toy, make_backend):
    with hal.activated(make_backend()(), fallback="reference"):
        assert hal.why(toy, X).chosen == "reference"
    with hal.activated(make_backend()()):
        assert hal.why(toy, X).chosen is None
        assert "reference: not allowed (fallback policy 'error')" in str(hal.why(toy, X))


def test_what_is_active_can_be_asked_for(toy, two):
    two.device = lambda index=0: torch.device("cpu", index)
    two.local_index = lambda: 3
    with hal.activated(two):
        assert [impl.id for impl in dispatch.candidates(toy)] == ["a", "b"] and not dispatch.runs_reference(toy)
        assert dispatch.chosen_backend() is two
        assert [d.index for d in (hal.device(), hal.device(2), hal.local_device())] == [0, 2, 3]
    with hal.activated(two, pin={"toy": "b"}):
        assert [impl.id for impl in dispatch.candidates(toy)] == ["b"] and not dispatch.runs_reference(toy)
    with hal.activated(two, pin={"toy": "reference"}):
        (reference,) = dispatch.candidates(toy)
        assert reference.id == "reference" and reference.by_metadata and dispatch.runs_reference(toy)
    dispatch._set(None)
    assert dispatch.chosen_backend() is None


def test_calls_are_wrapped_for_a_block(toy, two):
    seen = []

    def around(impl, call):
        def wrapped(*args, **kwargs):
            seen.append(impl.id)
            return call(*args, **kwargs)

        return wrapped

    with hal.activated(two):
        with dispatch.wrapped_calls(around):
            assert toy(X)[0] == 100 and toy(X, scale=2.0)[0] == 200
            with hal.policy(pin={"toy": "b"}):
                assert toy(X)[0] == 200
        assert toy(X)[0] == 100
    assert seen == ["a", "b", "b"]


def test_why_in_words(toy, two):
    def lines(*args, **kwargs):
        return str(hal.why(toy, *args, **kwargs)).splitlines()

    two.order_sources = {"toy": "measured"}
    refused = ["  a: refuses: scale 2.0 (only 1)", "  b: refuses: w is given; w has a dtype"]
    order = "  order: measured"
    with hal.activated(two):
        assert lines(X) == ["toy on backend 'cpu_toy':", "  a: chosen", "  b: accepts", order]
        assert lines(X, W, scale=2.0)[1:] == [*refused, "  reference: not allowed (fallback policy 'error')", order]
    with hal.activated(two, fallback="reference"):
        assert lines(X, W, scale=2.0)[1:] == [*refused, "  reference: chosen (fallback policy)", order]
        assert lines(X)[1:] == ["  a: chosen", "  b: accepts", order]
    with hal.activated(two, pin={"toy": "reference"}, fallback="reference"):
        assert lines(X) == ["toy on backend 'cpu_toy' (pinned to reference):", "  reference: chosen"]
    with hal.activated(two, pin={"toy": "b"}):
        assert lines(X) == ["toy on backend 'cpu_toy' (pinned to b):", "  b: chosen"], "a pin has no order"


def test_what_is_activated_is_returned_and_stays_until_the_end_of_a_block(toy, two, make_backend):
    other = make_backend("cpu_other")()
    with hal.activated(two) as inner:
        assert inner is two is hal.backend() and hal.device() == torch.device("cpu")
        with pytest.raises(ZeroDivisionError), hal.activated(other):
            assert hal.backend() is other
            raise ZeroDivisionError
        assert hal.backend() is two
        assert hal.activate(other) is other is hal.backend()
        with pytest.raises(hal.HalError, match="unknown fallback policy 'maybe'"):
            hal.activate(two, fallback="maybe")
        assert hal.backend() is other


@pytest.mark.parametrize("answer, kind", [("no", "str"), (None, "NoneType"), (True, "bool")])
def test_a_why_not_that_returns_no_reasons_is_a_plugin_error(toy, make_backend, answer, kind):
    backend = make_backend()
    why_not = hal.by_metadata(lambda call: answer)
    backend.impl(toy, id="a", why_not=why_not)(toy.reference)
    with hal.activated(backend()), pytest.raises(hal.PluginError, match=f"why_not of 'a' returned {kind}"):
        toy(X)


# Choosing a backend.


@pytest.fixture
def registered(isolated, make_backend, monkeypatch):
    """Registers the backend names "ready" and "unready"."""

    class Ready(make_backend("ready")):
        built = 0

        def build(self):
            type(self).built += 1

    class Unready(make_backend("unready")):
        def probe(self):
            return hal.Probe(False, 0, "no such device")

    module = sys.modules[__name__]
    monkeypatch.setattr(module, "Ready", Ready, raising=False)
    monkeypatch.setattr(module, "Unready", Unready, raising=False)
    monkeypatch.setitem(hal.core.registry.IN_TREE, "ready", f"{__name__}:Ready")
    monkeypatch.setitem(hal.core.registry.IN_TREE, "unready", f"{__name__}:Unready")
    return Ready


def test_a_device_that_is_a_string_is_a_plugin_error(registered, monkeypatch):
    monkeypatch.setattr(registered, "device", lambda self, index=0: torch.device("cpu") if index else "cpu")
    with pytest.raises(hal.PluginError, match=r"device\(0\) of backend 'ready' returned 'cpu'"):
        hal.use("ready")


def test_use_probes_builds_activates_and_tells_the_children(registered):
    backend = hal.use("ready")
    assert hal.backend() is backend
    assert registered.built == 1
    assert os.environ["HAL_BACKEND"] == "ready"
    assert hal.device() == torch.device("cpu")


def test_a_backend_that_cannot_run_here_says_why(registered):
    with pytest.raises(hal.BackendUnavailable, match=r"'unready' cannot run here: no such device.*hal doctor"):
        hal.use("unready")


def test_there_is_no_default(registered, monkeypatch):
    hal.core.dispatch._set(None)
    with pytest.raises(hal.BackendNotFound, match=r"no backend was chosen; call hal.use\(name\).*cpu_ref"):
        hal.backend()
    monkeypatch.setenv("HAL_BACKEND", "ready")
    assert hal.backend().name == "ready"


def test_an_op_called_before_any_choice_asks_for_one(toy):
    hal.core.dispatch._set(None)
    with pytest.raises(hal.BackendNotFound, match="no backend was chosen"):
        toy(X)


def test_a_tensor_elsewhere_is_refused_before_any_implementation_sees_it(toy, two):
    with hal.activated(two):
        with pytest.raises(hal.ContractError, match="is on meta, but the active backend 'cpu_toy' works on cpu"):
            toy(X, W.to("meta"), scale=1.0)
        assert toy(X.to("meta")).is_meta  # without any data, only shapes are computed
        assert hal.why(toy, X.to("meta")).chosen == "a"  # the explanation needs no data


# Errors of asynchronous devices.


@pytest.fixture
def late(toy, make_backend):
    """A backend whose device fails at the next synchronisation after a call with scale 13."""
    backend = make_backend()
    failed = []

    def run(x, w=None, *, scale=1.0):
        if scale == 13.0:
            failed.append(scale)
        return x * scale, (scale,)

    def bwd(residuals, dy):
        if residuals[0] == 7.0:
            failed.append(7.0)
        return dy, None

    def synchronize(self):
        if failed:
            failed.clear()
            raise RuntimeError("an illegal address")

    backend.impl(toy, id="a", bwd=bwd)(run)
    backend.synchronize = synchronize
    backend.capabilities = lambda self: hal.Capabilities(asynchronous=True)
    return backend()


def test_an_error_that_surfaces_late_names_the_calls_issued_before(toy, late):
    with hal.activated(late):
        toy(X)
        hal.synchronize()
        toy(X, scale=13.0)
        toy(X, scale=2.0)
        with pytest.raises(
            hal.DeviceError, match=r"(?s)an illegal address.*one of the 2 issued.*HAL_SYNCHRONOUS"
        ) as error:
            hal.synchronize()
        assert error.value.calls == ("toy (a)", "toy (a)")
        hal.synchronize()
        for _ in range(21):
            toy(X)
        with pytest.raises(hal.DeviceError, match="one of the 21 issued") as error, hal.device_errors():
            raise RuntimeError("what loss.item() raises")
        assert len(error.value.calls) == 21 and str(error.value).count("toy (a)") == 20, "the latest are listed"
        with hal.device_errors():
            toy(X)  # stands for a value that is read without an error
        assert hal.core.issued.calls() == []
        with pytest.raises(hal.DeviceError), hal.device_errors():
            raise RuntimeError("what loss.item() raises")
        with pytest.raises(hal.ContractError), hal.device_errors():
            toy(X, scale=0.0)


def test_in_synchronous_mode_the_failed_call_is_named(toy, late, monkeypatch):
    x = torch.ones(2, requires_grad=True)
    with hal.activated(late, synchronous=True):
        toy(x)
        with pytest.raises(hal.DeviceError, match=r"^toy \(a\) failed on the device: an illegal address") as error:
            toy(x, scale=13.0)
        assert error.value.calls == ("toy (a)",)
        y = toy(x, scale=7.0).sum()
        with pytest.raises(hal.DeviceError, match=r"^toy \(a\), backward failed on the device"):
            y.backward()
    monkeypatch.setenv("HAL_SYNCHRONOUS", "1")
    with hal.activated(late), hal.policy(fallback="reference"), pytest.raises(hal.DeviceError, match="failed on"):
        toy(x, scale=13.0)


def test_a_synchronous_device_pays_nothing_and_its_errors_stay_as_they_are(toy, two):
    with hal.activated(two):
        toy(X)
        assert hal.core.issued.after is None and hal.core.issued.calls() == []
        hal.synchronize()
        with pytest.raises(RuntimeError, match="of the program"), hal.device_errors():
            raise RuntimeError("of the program")


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_op_with_many_options_passes_them_all_on(make_backend, wrapped):
    """Options are bound as defaults of a Python function; a wrapper of another signature receives them by name."""
    backend, received = make_backend(), []
    header = fragments(ops.flash_attention.signature)
    attention = define(
        "attention",
        f"def attention({header.header}):\n    _received.append(({', '.join(header.names)}))\n    return q\n",
        {**header.scope, "_received": received},
        "recording attention",
    )
    function = functools.wraps(attention)(lambda *args, **kwargs: attention(*args, **kwargs)) if wrapped else attention
    backend.impl(ops.flash_attention, id="a", version=ops.flash_attention.version)(function)
    q, options = torch.zeros(4, 2, 8), {"layout": "SBH", "num_heads": 2}
    bias = torch.zeros(2, 4, 4)
    calls = [{}, {}, {"next_tokens": 0}, {"next_tokens": 0}, {"scale": 0.5}, {"bias": bias}, {"bias": bias}, {}]
    calls += [{"return_lse": True}, {"return_lse": False}]
    calls += [{"dropout_p": 0.1, "rng": hal.Rng(1, 0)}, {"dropout_p": 0.1, "rng": hal.Rng(2, 0)}]
    with hal.activated(backend()):
        for more in calls:
            k = torch.ones(4, 2, 8)
            ops.flash_attention(q, k, k, **options, **more)
            expected = ops.flash_attention.Call(q, k, k, **options, **more)
            got = dict(zip(header.names, received[-1]))
            assert all(got[name] is getattr(expected, name) for name in header.names)
    assert len(received) == len(calls)
