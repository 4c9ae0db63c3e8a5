"""What an op is: a reference function with its contract, tolerances and sample calls.

The reference is the schema (its signature), the semantics (its text) and, in float64, the oracle every backend is
tested against. `Op` instances are callables: calling one dispatches to the active backend (see dispatch.py).
Nothing here imports a backend, a test framework or a vendor package.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import torch

from .comm import Comm
from .errors import ContractError, HalError
from .rng import Rng
from .signature import annotation_text, define, fragments, tensor_kind

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

P = ParamSpec("P")
R = TypeVar("R")

OPS: dict[str, Op[Any, Any]] = {}
"""Every op by name, in the order of definition."""


@dataclass(frozen=True)
class Tol:
    """Allowed error of one (op, dtype) against the float64 reference: |y - y64| <= atol + rtol * |y64|."""

    atol: float
    rtol: float


@dataclass(frozen=True)
class T:
    """Description of one tensor argument of a sample call; its repr is the code that makes it.

    dist: "normal" (times scale), "int" (low <= x < high), "bool" (True with probability p), "values" (explicit).
    dtype None means the dtype under test. strided: "rows" leaves gaps between rows and begins one element into its
    memory (a pointer that is aligned to the element only), "last" makes the last dimension non-contiguous.
    """

    shape: tuple[int, ...]
    dist: str = "normal"
    scale: float = 1.0
    low: int = 0
    high: int = 2
    p: float = 0.5
    values: tuple[float, ...] = ()
    dtype: torch.dtype | None = None
    strided: str = ""

    def build(self, dtype: torch.dtype, seed: int) -> torch.Tensor:
        """The tensor, on the CPU; the same for the same seed, whatever the dtype (up to rounding)."""
        generator = torch.Generator().manual_seed(seed)
        want = self.dtype or dtype
        if self.dist == "int":
            x = torch.randint(self.low, self.high, self.shape, generator=generator)
        elif self.dist == "bool":
            x = torch.rand(self.shape, generator=generator) < self.p
        elif self.dist == "values":
            x = torch.tensor(self.values, dtype=torch.float64).reshape(self.shape)
        else:
            x = torch.randn(self.shape, generator=generator, dtype=torch.float64) * self.scale
        # Rounded first to the dtype under test, so that the float64 oracle sees the very same inputs.
        x = x.to(want)
        if self.strided and x.ndim and x.numel():
            wide = list(self.shape)
            wide[-1] = wide[-1] * 2 if self.strided == "last" else wide[-1] + 3
            store = torch.zeros(wide, dtype=want)
            view = store[..., ::2] if self.strided == "last" else store[..., 1 : self.shape[-1] + 1]
            return view.copy_(x)
        return x


@dataclass(frozen=True)
class Sample:
    """One valid call of an op: plain values, `Rng`s, `T`s and lists of `T`s. The repr is runnable code.

    grad=False marks a call whose gradients are not compared (say, NaN inputs).
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    grad: bool = True

    def build(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with every `T` made into a tensor of `dtype` on `device`."""
        count = 0

        def make(value: Any) -> Any:
            nonlocal count
            if isinstance(value, T):
                count += 1
                x = value.build(dtype, seed=count)
                # A plain .to() would lose the strides and the offset that the sample asks for.
                if torch.device(device).type == "cpu":
                    return x
                store = torch.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device=device)
                return store.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)
            if isinstance(value, list):
                return [make(v) for v in value]
            return value

        args = tuple(make(v) for v in self.args)
        return args, {k: make(v) for k, v in self.kwargs.items()}


class Op(Generic[P, R]):
    """An abstract operation. Made by `@hal.op`; see `op` for the parameters."""

    known: dict[tuple[Any, ...], Callable[..., Any]]
    """What runs a call of this metadata on the active backend, as `learn` found it: an implementation, or `asks`."""
    asks: Callable[..., Any] | None = None
    """What `asking` has made."""

    def __init__(
        self,
        reference: Callable[P, R],
        *,
        check: Callable[..., None],
        tol: Mapping[torch.dtype, Tol],
        samples: Callable[[], SearchStrategy[Sample]],
        directed: Callable[[], Sequence[Sample]],
        grads: Sequence[str],
        mutates: Sequence[str],
        nondiff_outputs: Sequence[int],
        hints: Sequence[str],
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.check = check
        self.tol = dict(tol)
        self.samples = samples
        self.directed = directed
        self.signature = inspect.signature(reference)
        self.grads = tuple(grads)
        self.mutates = tuple(mutates)
        self.nondiff_outputs = tuple(nondiff_outputs)
        self.hints = tuple(hints)
        functools.update_wrapper(self, reference)
        require_same_signature(self, check, f"check of op '{self.name}'")
        unknown = [p for p in (*self.grads, *self.mutates, *self.hints) if p not in self.signature.parameters]
        if unknown:
            raise HalError(
                f"op '{self.name}': grads/mutates/hints name {unknown}, which its signature {self.signature} lacks"
            )
        for hint in (self.signature.parameters[h] for h in self.hints):
            if hint.kind is not hint.KEYWORD_ONLY or hint.default is hint.empty:
                raise HalError(f"op '{self.name}': the hint {hint.name} must be keyword-only and have a default")

    if TYPE_CHECKING:  # the real one is generated per op, see _op_class

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def verify(self, *args: Any, **kwargs: Any) -> None:
        """Raises ContractError for a call that is wrong on every backend: not the parameters, or refused by check."""
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise ContractError(f"{self.name}: {error}. Signature: {self.name}{self.signature}") from None
        for name, value in given.items():
            kind = tensor_kind(self.signature.parameters[name].annotation)
            good = {
                "tensor": isinstance(value, torch.Tensor),
                "optional": value is None or isinstance(value, torch.Tensor),
                "tensors": value is None
                or (
                    isinstance(value, (list, tuple)) and all(issubclass(t, torch.Tensor) for t in set(map(type, value)))
                ),
            }.get(kind, True)
            good = good and (bool(kind) or _fits(value, self.signature.parameters[name].annotation))
            # With its module: NumPy's bool would read as Python's.
            found = type(value).__qualname__ if type(value).__module__ == "builtins" else repr(type(value))
            require(good, self.name, f"{name}: {self.signature.parameters[name].annotation}", found)
        self.check(*args, **kwargs)

    def admit(self, *args: Any, **kwargs: Any) -> None:
        """verify, and that every tensor holds data where the active backend works. Completed by dispatch.py."""
        raise NotImplementedError

    def learn(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """admit, then what is to run all calls of this metadata. Completed by dispatch.py."""
        raise NotImplementedError

    def keep(self, key: tuple[Any, ...] | None, run: Callable[..., Any]) -> None:
        """Remembers what runs calls of this metadata; a list among the plain values cannot be remembered."""
        if len(self.known) >= _MEMO_LIMIT:
            self.known.clear()
        if key is not None:
            with contextlib.suppress(TypeError):
                self.known[key] = run

    def asking(self) -> Callable[..., Any]:
        """A function that runs the first implementation without reasons against the call. Completed by dispatch.py."""
        raise NotImplementedError

    def forget(self) -> None:
        """Makes calls look everything up anew: the backend, its implementations or the policy have changed."""
        self.known.clear()
        self.asks = None

    def __repr__(self) -> str:
        return f"<hal op {self.name}{self.signature}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _find_op, (self.name,)


def _fits(value: object, annotation: object) -> bool:
    """Whether a plain value is what its parameter's annotation says; of an annotation unknown here, True."""
    wanted, bar, _ = annotation_text(annotation).partition(" | None")
    if value is None:
        return bool(bar) or wanted not in _PLAIN
    return isinstance(value, _PLAIN.get(wanted, (object,)))


_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int, numbers.Integral, torch.SymInt),
    "float": (float, int, numbers.Real, torch.SymFloat, torch.SymInt),
    "bool": (bool, torch.SymBool),
    "str": (str,),
    "Sequence[int]": (list, tuple, range),
    "Rng": (Rng,),
    "Comm": (Comm,),
}
_MEMO_LIMIT = 4096


def _op_class(signature: inspect.Signature, name: str) -> type[Op[Any, Any]]:
    """Op with a __call__ of this signature: check the call (once per metadata), run the first candidate that accepts.

    A check sees only shapes, dtypes and plain values, so its verdict is remembered under exactly those and under which
    tensors are in host memory; so is the choice among implementations whose why_not is `by_metadata`. Any other why_not
    is asked on every call: it may look at strides or pointers. Ops on lists of tensors are checked on every call.
    """
    key, memo = [], True
    for parameter, p in signature.parameters.items():
        kind, text = tensor_kind(p.annotation), str(p.annotation)
        if kind == "tensor":
            key.append(f"{parameter}.shape, {parameter}.dtype, {parameter}.is_cpu")
        elif kind == "optional":
            seen = f"({parameter}.shape, {parameter}.dtype, {parameter}.is_cpu)"
            key.append(f"{parameter} if {parameter} is None else {seen}")
        elif text.startswith("Rng"):
            key.append(f"{parameter} if {parameter} is None else ({parameter}.full_shape, {parameter}.start)")
        elif text.startswith("Comm"):
            key.append(f"{parameter} if {parameter} is None else {parameter}.size")
        else:
            memo = memo and kind != "tensors"
            key.append(parameter)
    f = fragments(signature)
    if memo:
        source = (
            f"def __call__(self, {f.header}):\n"
            # AttributeError, TypeError: a list where a tensor should be, say; `learn` then names the parameter.
            f"    key = None\n"
            f"    try:\n        key = ({', '.join(key)},)\n        run = known[key]\n"
            f"    except (KeyError, AttributeError, TypeError):\n        run = None\n"
            f"    if run is None:\n"
            f"        run = self.learn({f.passed})\n"
            f"        self.keep(key, run)\n"
            f"    return run({f.passed})\n"
        )
    else:
        source = (
            f"def __call__(self, {f.header}):\n    self.admit({f.passed})\n"
            f"    return (self.asks or self.asking())({f.passed})\n"
        )
    own: dict[str, Any] = {"known": {}}  # each op has a class of its own
    call = _between_graphs(define("__call__", source, {**own, **f.scope}, f"dispatch of {name}"))
    return type("Op", (Op,), {"__call__": call, "__module__": __name__, **own})


def _between_graphs(call: Callable[..., Any]) -> Callable[..., Any]:
    """Has torch.compile run `call`, and all that it calls, as it is: there is nothing to trace in a kernel.

    What torch.compiler.disable does, without its wrapper, which would cost every call a microsecond.
    """
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "HAL's ops run between graphs; hal.lower(op) is an op for inside one"  # type: ignore[attr-defined]
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(call.__code__, frames._FrameExecStrategy(skip, skip))
    return call


def _find_op(name: str) -> Op[Any, Any]:
    return OPS[name]


def require_same_signature(op: Op[Any, Any], function: Callable[..., Any], what: str) -> None:
    """Raises HalError unless `function` has the op's parameter names, kinds and defaults, in order; hints may lack."""

    def shape(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
        return [(p.name, p.kind, p.default) for p in signature.parameters.values()]

    found = inspect.signature(function)
    lacking = [h for h in op.hints if h not in found.parameters]
    if shape(found) != [p for p in shape(op.signature) if p[0] not in lacking]:
        raise HalError(
            f"{what} must have the signature of the reference\n  reference: {op.name}{op.signature}\n"
            f"  found:     {getattr(function, '__name__', function)}{found}\nUse the same names, order and defaults."
        )


def accepting_hints(op: Op[Any, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, made to take (and ignore) those of the op's hints that it was written without."""
    signature = inspect.signature(function)
    if all(h in signature.parameters for h in op.hints):
        return function
    f = fragments(op.signature)
    source = f"def accepting({f.header}):\n    return function({fragments(signature).passed})\n"
    return define("accepting", source, {"function": function, **f.scope}, f"hints of {op.name}")


def op(
    *,
    check: Callable[..., None],
    tol: Mapping[torch.dtype, Tol],
    samples: Callable[[], SearchStrategy[Sample]],
    directed: Callable[[], Sequence[Sample]] = tuple,
    grads: Sequence[str] = (),
    mutates: Sequence[str] = (),
    nondiff_outputs: Sequence[int] = (),
    hints: Sequence[str] = (),
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declares an op; decorates its reference function.

    check: same parameters as the reference; raises ContractError for a call that is wrong on every backend. It looks
        at shapes, dtypes and plain values only, never at what a tensor holds.
    tol: allowed error per input dtype against the reference in float64; also the list of dtypes the kit tests.
    samples: called by the kit, returns a hypothesis strategy of `Sample`s (valid calls only).
    directed: called by the kit, returns the samples that random draws would miss.
    grads: parameters that have a gradient, in signature order; () = the op is not differentiable.
    mutates: parameters written in place (tensors or lists of tensors).
    nondiff_outputs: indices of outputs (when the result is a tuple) that carry no gradient.
    hints: keyword-only flags that permit something and never change a result. An implementation may lack them, so a
        backend written before the op had one goes on working.
    """

    def decorate(reference: Callable[P, R]) -> Op[P, R]:
        made: Op[P, R] = _op_class(inspect.signature(reference), reference.__name__)(
            reference,
            check=check,
            tol=tol,
            samples=samples,
            directed=directed,
            grads=grads,
            mutates=mutates,
            nondiff_outputs=nondiff_outputs,
            hints=hints,
        )
        if made.name in OPS:
            raise HalError(
                f"op '{made.name}' is defined twice ({OPS[made.name].__module__} and {reference.__module__})"
            )
        OPS[made.name] = made
        return made

    return decorate


def require(condition: bool, op_name: str, asked: str, found: object, hint: str = "") -> None:
    """Raises ContractError with the one format all checks use, unless `condition`."""
    if not condition:
        raise ContractError(f"{op_name}: expected {asked}; found {found}" + (f". {hint}" if hint else ""))


__all__ = ["OPS", "Op", "Rng", "Sample", "T", "Tol", "op", "require", "require_same_signature"]
