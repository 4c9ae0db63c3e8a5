"""cross_entropy's gradient takes the logits' memory exactly when nobody can see the logits again."""

import pytest
import torch
import torch.nn.functional as F

import hal
from hal import ops
from hal.backends.cpu_ref import spare

TARGET = torch.tensor([1, 0, 3])


@pytest.fixture(autouse=True)
def cpu_ref(monkeypatch):
    monkeypatch.setenv("HAL_BACKEND", "cpu_ref")
    backend = hal.registry.make("cpu_ref")
    backend.build()
    with hal.activated(backend):
        yield


class Head(torch.autograd.Function):
    """logits = w * 1, as a fresh tensor or as a view of one, recording where the gradient lies and what it is."""

    seen: dict = {}  # noqa: RUF012

    @staticmethod
    def forward(ctx, w, view):
        out = w.flatten().clone() if view else w.clone()
        Head.seen = {"address": out.data_ptr(), "kept": []}
        return out.view(w.shape) if view else out

    @staticmethod
    def backward(ctx, grad):
        Head.seen["reused"] = grad.data_ptr() == Head.seen["address"]
        return grad.clone(), None


def setup(view):
    torch.manual_seed(0)
    w = torch.randn(3, 5, requires_grad=True)
    (expected,) = torch.autograd.grad(F.cross_entropy(w, TARGET, reduction="none").sum(), w)
    return w, expected, Head.apply(w, view)


@pytest.mark.parametrize("view", [False, True])
def test_logits_that_nobody_holds_become_the_gradient(view):
    w, expected, logits = setup(view)
    loss = ops.cross_entropy(logits, TARGET).sum()
    del logits
    loss.backward()
    assert Head.seen["reused"]
    torch.testing.assert_close(w.grad, expected)


HOLD = {
    "the tensor": lambda t: t,
    "a view": lambda t: t.view(-1),
    "a slice": lambda t: t[1:],
    "a detached alias": lambda t: t.detach(),
    "an array": lambda t: t.detach().numpy(),
    "its storage": lambda t: t.untyped_storage(),
    "its base": lambda t: t if t._base is None else t._base,
    "a node of another graph": lambda t: (t * torch.ones_like(t).requires_grad_()).sum(),
    "a second loss": lambda t: ops.cross_entropy(t, TARGET).sum(),
}


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("how", HOLD)
def test_logits_that_somebody_holds_are_left_alone(how, view):
    w, expected, logits = setup(view)
    before, held = logits.detach().clone(), HOLD[how](logits)
    loss = ops.cross_entropy(logits, TARGET).sum()
    del logits
    loss.backward()
    assert not Head.seen["reused"]
    torch.testing.assert_close(w.grad, expected)
    if how == "the tensor":
        torch.testing.assert_close(held, before, rtol=0, atol=0)


@pytest.mark.parametrize("view", [False, True])
def test_a_graph_that_is_kept_gives_the_same_gradient_again(view):
    w, expected, logits = setup(view)
    loss = ops.cross_entropy(logits, TARGET).sum()
    del logits
    loss.backward(retain_graph=True)
    torch.testing.assert_close(w.grad, expected)
    loss.backward()
    torch.testing.assert_close(w.grad, 2 * expected)


def test_two_losses_on_the_same_logits_add_up():
    w, expected, logits = setup(False)
    loss = ops.cross_entropy(logits, TARGET).sum() + ops.cross_entropy(logits, TARGET).sum()
    del logits
    loss.backward()
    torch.testing.assert_close(w.grad, 2 * expected)


def test_leaf_logits_are_left_alone():
    logits = torch.randn(3, 5, requires_grad=True)
    before = logits.detach().clone()
    ops.cross_entropy(logits, TARGET).sum().backward()
    torch.testing.assert_close(logits.detach(), before, rtol=0, atol=0)


def test_where_counts_tell_nothing_the_answer_is_no(monkeypatch):
    """As on a Python or torch whose reference counts do not show who holds a tensor."""
    monkeypatch.setattr(spare, "_spare", {})
    monkeypatch.setattr(spare, "_counts", lambda t: (1, 1, 1))
    w, expected, logits = setup(False)
    loss = ops.cross_entropy(logits, TARGET).sum()
    del logits
    loss.backward()
    assert not Head.seen["reused"]
    torch.testing.assert_close(w.grad, expected)


def test_the_gpt_reuses_its_logits(monkeypatch):
    from hal.backends.cpu_ref import vocab
    from hal.model.config import Config
    from hal.model.gpt import GPT

    answers = []

    def record(*question):
        answers.append(spare.is_spare(*question))
        return answers[-1]

    ids = torch.randint(64, (2, 9))
    model = GPT(
        Config(num_layers=1, hidden_size=32, num_attention_heads=2, seq_length=8, vocab_size=64), torch.device("cpu")
    )
    monkeypatch.setattr(spare, "_spare", {})  # learned anew, with `record` on the way
    monkeypatch.setattr(vocab, "is_spare", record)
    model.loss(model(ids[:, :-1]), ids[:, 1:]).backward()
    assert answers[0] is True or answers[-1] is True
