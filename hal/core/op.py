"""Definition of ops: a reference function with its contract, tolerances and sample calls.

The reference is the schema (its signature), the semantics (its text) and, in float64, the oracle every backend is
tested against. `Op` instances are callables: calling one dispatches to the active backend (see dispatch.py).
Nothing here imports a backend, a test framework or a vendor package.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, Protocol, TypeVar

import torch

from ..errors import ContractError, HalError
from . import op_call, torch_arguments
from .adapters import passing_known, require_same_signature, require_takes_call
from .call import Call, call_class
from .signature import Schema

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
class TensorSpec:
    """Description of one tensor argument of a sample call; its repr is runnable code.

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
        """The tensor, on the CPU; the same for the same seed in every dtype (up to rounding)."""
        generator = torch.Generator().manual_seed(seed)
        dtype = self.dtype or dtype
        if self.dist == "int":
            x = torch.randint(self.low, self.high, self.shape, generator=generator)
        elif self.dist == "bool":
            x = torch.rand(self.shape, generator=generator) < self.p
        elif self.dist == "values":
            x = torch.tensor(self.values, dtype=torch.float64).reshape(self.shape)
        else:
            x = torch.randn(self.shape, generator=generator, dtype=torch.float64) * self.scale
        # Rounded to the dtype under test before anything else, so that the float64 oracle gets the same inputs.
        x = x.to(dtype)
        if self.strided and x.ndim and x.numel():
            padded = list(self.shape)
            padded[-1] = padded[-1] * 2 if self.strided == "last" else padded[-1] + 3
            store = torch.zeros(padded, dtype=dtype)
            view = store[..., ::2] if self.strided == "last" else store[..., 1 : self.shape[-1] + 1]
            return view.copy_(x)
        return x


@dataclass(frozen=True)
class DtypeSpec:
    """A placeholder in sample calls for the dtype under test, as the value of a parameter of type torch.dtype."""


@dataclass(frozen=True)
class Sample:
    """One valid call of an op: plain values, `Rng`s, specs of arguments and lists of them. The repr is runnable code.

    grad=False marks a call whose gradients are not compared (for example, with NaN inputs).
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    grad: bool = True

    def build(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with tensors of `dtype` on `device` in place of `TensorSpec`s, `dtype` of `DtypeSpec`s."""
        count = 0

        def make(value: Any) -> Any:
            nonlocal count
            if isinstance(value, TensorSpec):
                count += 1
                x = value.build(dtype, seed=count)
                # A plain .to() would lose the strides and the offset that the sample specifies.
                if torch.device(device).type == "cpu":
                    return x
                store = torch.zeros(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype, device=device)
                return store.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)
            if isinstance(value, list):
                return [make(v) for v in value]
            return dtype if isinstance(value, DtypeSpec) else value

        args = tuple(make(v) for v in self.args)
        return args, {k: make(v) for k, v in self.kwargs.items()}


@dataclass(frozen=True)
class Choice:
    """An integer output that identifies the values that an op has chosen, where rounding decides between close ones.

    The conformance kit accepts every choice that is `right`, and compares the other outputs and the gradients with
    those of the reference for the same choice. Without this, an integer output must equal the reference's.

    output: its index in the result. parameter: the op's parameter, by default None, that prescribes the choice.
    right: called with a call in float64 on the CPU and the output of an implementation, returns whether each row of it
    (dimension 0) may be the result: a bool tensor.
    """

    output: int
    parameter: str
    right: Callable[[Call, torch.Tensor], torch.Tensor]


class Dispatcher(Protocol):
    """Decides which function runs an op's call. hal.core.dispatch implements it for the active backend and policy.

    An op caches the results until `Op.forget` is called.
    """

    def admit(self, op: Op[Any, Any], call: Call) -> None:
        """Raises ContractError for a call whose tensors are on another kind of device than the backend's."""

    def by_metadata(self, op: Op[Any, Any], call: Call) -> Callable[..., Any] | None:
        """The implementation of all calls that agree with this one in metadata.

        None if the why_not of an implementation before it depends on more than metadata, and so must run on every call.
        """

    def candidates(self, op: Op[Any, Any]) -> Callable[..., Any]:
        """A function with the op's signature that calls every candidate's why_not and runs the first that accepts."""


class Router(Protocol):
    """Routes calls that are traced or transformed. hal.core.transforms implements it."""

    def transformed(self, op: Op[Any, Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
        """The function that runs a call while a dispatch mode, functorch or a forward-mode level is active.

        None: the call runs as in eager code. Raises UnsupportedOp for a dual tensor.
        """

    def unreal(self, op: Op[Any, Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
        """The function that runs a call whose tensors have no elements (fake, meta), or that torch.jit.trace records;
        else None."""

    def lowered(self, op: Op[Any, Any]) -> Any:
        """`hal.lower(op)`."""


_dispatcher: Dispatcher
_router: Router


def install_router(router: Router) -> None:
    """Sets the router of all ops; hal.core.transforms calls this once, when it is imported."""
    global _router
    _router = router


def install_dispatcher(dispatcher: Dispatcher) -> None:
    """Sets the dispatcher of all ops; hal.core.dispatch calls this once, when it is imported."""
    global _dispatcher
    _dispatcher = dispatcher


class Op(Generic[P, R]):
    """An abstract operation. Made by `@hal.op`; see `op` for the parameters."""

    memo: ClassVar[dict[tuple[Any, ...], Callable[..., Any] | op_call.Bound]]
    """The function that runs a call, by the call's metadata (see op_call.py). Each op has its own class and memo."""

    def __init__(
        self,
        reference: Callable[P, R],
        schema: Schema,
        *,
        check: Callable[[Call], None],
        tol: Mapping[torch.dtype, Tol],
        samples: Callable[[], SearchStrategy[Sample]],
        edge_cases: Callable[[], Sequence[Sample]],
        grads: Sequence[str],
        mutates: Sequence[str],
        nondiff_outputs: Sequence[int],
        hints: Sequence[str],
        decompose: Callable[..., Any] | None,
        parts: Sequence[Op[Any, Any]],
        parts_of: Callable[[Call], Sequence[Op[Any, Any]]] | None,
        version: int,
        choice: Choice | None,
        shapes: Callable[[Call], Any] | None,
    ) -> None:
        self.name = reference.__name__
        self.reference = reference
        self.check = check
        self.tol = dict(tol)
        self.samples = samples
        self.edge_cases = edge_cases
        self.signature = inspect.signature(reference)
        self.schema = schema
        self.Call = call_class(self.name, self.signature)
        self.grads = tuple(grads)
        self.mutates = tuple(mutates)
        self.nondiff_outputs = tuple(nondiff_outputs)
        self.hints = tuple(hints)
        self.choice, self.shapes = choice, shapes
        self.kept: frozenset[str | int] | None = None
        """The parameters and results that a graph keeps for the backward pass; None until gradients.py needs them."""
        self.parts, self.version = tuple(parts), version
        self.parts_of = parts_of or (lambda call: self.parts)
        self._candidates: Callable[..., Any] | None = None
        functools.update_wrapper(self, reference)
        require_takes_call(check, f"check of op '{self.name}'")
        if parts and decompose is None:
            raise HalError(f"op '{self.name}': parts are the ops that decompose calls, which is not given")
        if decompose is not None:
            require_same_signature(self, decompose, f"decompose of op '{self.name}'")
        self.decompose = decompose and passing_known(self, decompose)
        chosen = () if choice is None else (choice.parameter,)
        unknown = [p for p in (*self.grads, *self.mutates, *self.hints, *chosen) if p not in self.signature.parameters]
        if unknown:
            raise HalError(
                f"op '{self.name}': grads/mutates/hints/choice name {unknown}, which its signature lacks: "
                f"{self.signature}"
            )
        for hint in (self.signature.parameters[h] for h in self.hints):
            if hint.kind is not hint.KEYWORD_ONLY or hint.default is hint.empty:
                raise HalError(f"op '{self.name}': the hint {hint.name} must be keyword-only and have a default")

    if TYPE_CHECKING:  # the real one is generated per op, see _op_class

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    def verify(self, *args: Any, **kwargs: Any) -> Call:
        """The call with these arguments. Raises ContractError if it is wrong on every backend: not the parameters, or
        refused by check.
        """
        try:
            call = self.Call(*args, **kwargs)
        except TypeError:
            try:
                self.signature.bind(*args, **kwargs)
            except TypeError as error:
                raise ContractError(f"{self.name}: {error}. Signature: {self.name}{self.signature}") from None
            raise
        for name, parameter in self.schema.parameters.items():
            value = getattr(call, name)
            if not parameter.accepts(value):
                require(False, self.name, str(parameter), _type_name(value))
        self.check(call)
        return call

    def resolve(self, key: tuple[Any, ...] | None, /, *args: Any, **kwargs: Any) -> Callable[..., Any] | op_call.Bound:
        """Verifies a call whose metadata `key` is new; caches and returns the function for calls with this metadata.

        key None: an argument of the wrong type (a list in place of a tensor) has no metadata; the call is refused here.
        """
        if (unreal := _router.unreal(self, *args, **kwargs)) is not None:
            return unreal
        call = self.verify(*args, **kwargs)
        _dispatcher.admit(self, call)
        chosen = _dispatcher.by_metadata(self, call)
        run: Callable[..., Any] | op_call.Bound
        if chosen is None:
            run = self.candidates()
        else:
            run = op_call.Bound.of(self.signature, self.schema, chosen, call) or chosen
        if len(self.memo) >= _MEMO_LIMIT:
            self.memo.clear()
        if key is not None:
            with contextlib.suppress(TypeError):  # a key with a list among the plain values cannot be hashed
                self.memo[key] = run
        return run

    def resolve_unremembered(self, /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Verifies a call of an op that has no metadata key, and returns the function that runs it."""
        if (unreal := _router.unreal(self, *args, **kwargs)) is not None:
            return unreal
        _dispatcher.admit(self, self.verify(*args, **kwargs))
        return self.candidates()

    def transformed(self, *args: Any, **kwargs: Any) -> Callable[..., Any] | None:
        """The function that runs a call under a mode or a transform, see `Router.transformed`."""
        return _router.transformed(self, *args, **kwargs)

    def candidates(self) -> Callable[..., Any]:
        """The dispatcher's function that checks every candidate on every call, created once per backend and policy."""
        if self._candidates is None:
            self._candidates = _dispatcher.candidates(self)
        return self._candidates

    def forget(self) -> None:
        """Drops all cached functions, because the backend, its implementations or the policy have changed."""
        self.memo.clear()
        self._candidates = self.kept = None

    def __repr__(self) -> str:
        return f"<hal op {self.name}{self.signature}>"

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _find_op, (self.name,)


def _type_name(value: object) -> str:
    """The type of a value for an error, with its module where there is one: NumPy's bool would read as Python's."""
    return type(value).__qualname__ if type(value).__module__ == "builtins" else repr(type(value))


_MEMO_LIMIT = 4096


def _op_class(
    signature: inspect.Signature,
    schema: Schema,
    name: str,
    arguments: Sequence[torch_arguments.Argument],
    mutates: Sequence[str],
) -> type[Op[Any, Any]]:
    """A subclass of Op for one op, whose generated __call__ has the signature of the reference.

    A check depends only on shapes, dtypes and plain values, so its result is cached under exactly those and under which
    tensors are in host memory; so is the choice among implementations whose why_not is `by_metadata`. Any other why_not
    runs on every call, because it may depend on strides or pointers. Ops on lists of tensors are checked on every call.

    torch.compile traces another function in place of __call__, which calls the op's torch op.
    """
    memo: dict[tuple[Any, ...], Callable[..., Any] | op_call.Bound] = {}
    call = op_call.eager(signature, schema, memo, name, mutates)
    call._torchdynamo_inline = op_call.traced(  # type: ignore[attr-defined]
        signature, schema, arguments, name, lower=lambda: _router.lowered(OPS[name]), run=lambda: OPS[name]
    )
    return type("Op", (Op,), {"__call__": call, "__module__": __name__, "memo": memo})


def _find_op(name: str) -> Op[Any, Any]:
    return OPS[name]


def op(
    *,
    check: Callable[[Call], None],
    tol: Mapping[torch.dtype, Tol],
    samples: Callable[[], SearchStrategy[Sample]],
    edge_cases: Callable[[], Sequence[Sample]] = tuple,
    grads: Sequence[str] = (),
    mutates: Sequence[str] = (),
    nondiff_outputs: Sequence[int] = (),
    hints: Sequence[str] = (),
    decompose: Callable[..., Any] | None = None,
    parts: Sequence[Op[Any, Any]] = (),
    parts_of: Callable[[Call], Sequence[Op[Any, Any]]] | None = None,
    version: int = 1,
    choice: Choice | None = None,
    shapes: Callable[[Call], Any] | None = None,
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Declares an op; decorates its reference function.

    check: raises ContractError for a `Call` that is wrong on every backend. It may use shapes, dtypes and plain values
        only, never at a tensor's elements.
    tol: allowed error per input dtype against the reference in float64; also the list of dtypes the kit tests.
    samples: called by the kit, returns a hypothesis strategy of `Sample`s (valid calls only).
    edge_cases: called by the kit, returns the samples that random draws would miss.
    grads: parameters that have a gradient, in signature order; () = the op is not differentiable.
    mutates: parameters written in place (tensors or lists of tensors).
    nondiff_outputs: indices of outputs (when the result is a tuple) that carry no gradient.
    hints: keyword-only flags that permit something and never change a result. An implementation may leave them out,
        so a backend that was written before the op had the hint keeps working.
    decompose: for a composite op: a function with the reference's signature that computes the op by calling other ops,
        or torch's functions alone. It runs where a backend has no implementation that accepts the call, and is
        differentiable through those ops.
    parts: the ops that decompose calls, if any. parts_of: those that it calls for one `Call`, by plain values, if not
        all.
    version: raised when the op's meaning or required parameters change. Implementations written for another version
        stay registered and refuse every call.
    choice: the output in which close values may be exchanged, if there is one.
    shapes: for a reference that reads elements of tensors, so that it cannot run on fake ones: called with a `Call`
        of fake tensors, returns tensors with the shapes and dtypes of the result (`torch.empty` makes them).
    """

    def decorate(reference: Callable[P, R]) -> Op[P, R]:
        schema = Schema.of(reference)
        signature, name = inspect.signature(reference), reference.__name__
        arguments = torch_arguments.of(schema, signature, hints, mutates)
        defined: Op[P, R] = _op_class(signature, schema, name, arguments, mutates)(
            reference,
            schema,
            check=check,
            tol=tol,
            samples=samples,
            edge_cases=edge_cases,
            grads=grads,
            mutates=mutates,
            nondiff_outputs=nondiff_outputs,
            hints=hints,
            decompose=decompose,
            parts=parts,
            parts_of=parts_of,
            version=version,
            choice=choice,
            shapes=shapes,
        )
        if defined.name in OPS:
            raise HalError(
                f"op '{defined.name}' is defined twice ({OPS[defined.name].__module__} and {reference.__module__})"
            )
        OPS[defined.name] = defined
        return defined

    return decorate


def require(condition: bool, op_name: str, asked: str, found: object, hint: str = "") -> None:
    """Raises ContractError with the one format all checks use, unless `condition`."""
    if not condition:
        raise ContractError(f"{op_name}: expected {asked}; found {found}" + (f". {hint}" if hint else ""))


__all__ = ["OPS", "Choice", "DtypeSpec", "Op", "Sample", "TensorSpec", "Tol", "op", "require"]
