"""Interprets pickles that other programs wrote, without Python's unpickler: a pickle is a program, and this runs the
few instructions that checkpoints need.

Guarantees: no class or function is looked up; a global is an entry of a table that the caller gives, and only its entry
decides what happens to its arguments and state. Memory and time are proportional to the length of the pickle: values
form trees of bounded depth and size, dictionary keys are flat, and containers have no cycles.
"""

from __future__ import annotations

import pickletools
from collections import Counter
from collections.abc import Callable
from typing import IO, Any, NamedTuple, NoReturn

from hal import HalError
from hal.untrusted import has_own_hash, one_line, shown

MAX_DEPTH = 64
_EXPANSION = 64
"""Most elements of a value per byte of its pickle, counting a value that is used again each time. As many elements may
all arguments, states and keys have together, since each use of them takes time and may make a copy."""

_COLLISIONS = 16
"""Most keys of one container that have the same hash. Those of tuples of integers can be chosen."""

_LONGEST_NAME = 500
"""Characters of a global's name, with its module."""

Build = Callable[[Any, Any], None]


class InvalidPickle(HalError):
    """A pickle is damaged, or does what no checkpoint needs."""


class UnsafeFile(HalError):
    """A file references code, so that unpickling it could execute that code. It was not unpickled."""


class Global(NamedTuple):
    """What a pickle may do with one of its globals.

    make: called with the arguments of REDUCE and NEWOBJ; None refuses them. build: called with an object that `make`
    returned and its state (BUILD); None refuses state. value: the value of the bare name, e.g. a dtype.
    """

    make: Callable[..., Any] | None = None
    build: Build | None = None
    value: Any = None


class Inert:
    """A placeholder for objects of other programs: accepts and ignores all constructor arguments and state."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        """Does nothing."""


def _ignore(target: Any, state: Any) -> None:
    pass


INERT = Global(Inert, _ignore, Inert())


class _Reference(NamedTuple):
    """A global on the stack: not the object itself, so that no instruction can change it."""

    name: str
    entry: Global


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_NUMBERS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "INT"}
_TEXTS = {"BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "STRING", "UNICODE"}
_SCALARS = _NUMBERS | _TEXTS | {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
_MARK = object()


def load(
    stream: IO[bytes],
    find: Callable[[str, str], Global],
    persistent: Callable[[Any], Any] | None = None,
    keys: tuple[type, ...] = (),
) -> Any:
    """The value of the pickle that begins at the position of `stream`, which is left after its end.

    find(module, name): the table of globals; raises for those that are not allowed. persistent: called with the id of
    an object outside the pickle. keys: types of dictionary keys besides numbers, texts, and tuples of them.
    Raises InvalidPickle, and what `find`, `persistent` and the entries raise.
    """
    return _Machine(stream, find, persistent, keys).run()


class _Machine:
    def __init__(self, stream: IO[bytes], find: Any, persistent: Any, keys: tuple[type, ...]) -> None:
        self._stream, self._find, self._persistent, self._keys = stream, find, persistent, keys
        self._length = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._owned: dict[int, tuple[Any, int, int]] = {}
        """id of a container or object -> (it, its depth, its size); being in here keeps the id in use."""
        self._sealed: set[int] = set()
        """Ids of containers that are part of another: they no longer change, so that depths and sizes stay right."""
        self._builds: dict[int, Build | None] = {}
        self._hashes: dict[int, Counter[int]] = {}
        """id of a dictionary or set -> how many of its keys have each hash."""
        self._used = 0
        """Elements of the arguments, states and keys so far, each as often as it was used."""

    def run(self) -> Any:
        try:
            start, table = self._stream.tell(), self._table()
            for opcode, argument, position in pickletools.genops(self._stream):
                self._length = position - start + 1 if position is not None else 0
                if opcode.name == "STOP":
                    (value,) = self._stack
                    return self._plain(value)
                if opcode.name not in table:
                    self._refuse(f"it contains the instruction {opcode.name}, which no checkpoint needs")
                table[opcode.name](argument)
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
            raise InvalidPickle(f"it is damaged: {one_line(error)}") from None
        return self._refuse("it has no end")

    def _refuse(self, reason: str) -> NoReturn:
        raise InvalidPickle(reason)

    def _table(self) -> dict[str, Callable[[Any], Any]]:
        """The instructions: name -> function of the argument that the pickle gives."""
        stack, pop, pop_mark = self._stack, self._pop, self._pop_mark
        table: dict[str, Callable[[Any], Any]] = {
            "PROTO": lambda _: None,
            "FRAME": lambda _: None,
            "MARK": lambda _: stack.append(_MARK),
            "TUPLE": lambda _: self._push_tuple(pop_mark()),
            "EMPTY_TUPLE": lambda _: self._push_tuple([]),
            "TUPLE1": lambda _: self._push_tuple([pop()]),
            "TUPLE2": lambda _: self._push_tuple([pop(), pop()][::-1]),
            "TUPLE3": lambda _: self._push_tuple([pop(), pop(), pop()][::-1]),
            "EMPTY_LIST": lambda _: self._push([], ()),
            "EMPTY_DICT": lambda _: self._push({}, ()),
            "EMPTY_SET": lambda _: self._push(set(), ()),
            "APPEND": lambda _: self._extend([pop()], list),
            "APPENDS": lambda _: self._extend(pop_mark(), list),
            "ADDITEMS": lambda _: self._extend(pop_mark(), set),
            "SETITEM": lambda _: self._set_items([pop(), pop()][::-1]),
            "SETITEMS": lambda _: self._set_items(pop_mark()),
            "MEMOIZE": lambda _: self._memo.update({len(self._memo): stack[-1]}),
            "GLOBAL": lambda name: self._push_global(*name.split(" ", 1)),
            "STACK_GLOBAL": lambda _: self._push_global(*[pop(), pop()][::-1]),
            "REDUCE": lambda _: self._call(),
            "NEWOBJ": lambda _: self._call(),
            "BUILD": lambda _: self._build(),
            "BINPERSID": lambda _: self._push(self._persistent(self._plain(pop())), ()),
        }
        for name, value in _CONSTANTS.items():
            table[name] = lambda _, value=value: stack.append(value)  # type: ignore[misc]
        table |= dict.fromkeys(_SCALARS, stack.append)
        # Strings of Python 2 are read as bytes, as torch does, which wrote them in Latin-1.
        table |= dict.fromkeys(("BINSTRING", "SHORT_BINSTRING"), lambda text: stack.append(text.encode("latin-1")))
        table |= dict.fromkeys(("BINPUT", "LONG_BINPUT", "PUT"), lambda n: self._memo.update({n: stack[-1]}))
        table |= dict.fromkeys(("BINGET", "LONG_BINGET", "GET"), lambda n: stack.append(self._memo[n]))
        if self._persistent is None:
            del table["BINPERSID"]
        return table

    # The stack.

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            self._refuse("it is damaged: a mark in place of a value")
        return value

    def _pop_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                self._refuse("it is damaged: a mark is missing")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _plain(self, value: Any) -> Any:
        """The value for a container or an argument: a bare global stands for its `value`."""
        if isinstance(value, _Reference):
            if value.entry.value is None:
                self._refuse(f"it uses {value.name} as a value")
            return value.entry.value
        if value is _MARK:
            self._refuse("it is damaged: a mark in place of a value")
        return value

    # Depth and size. `_owned` knows those of containers and objects; everything else is a leaf.

    def _measure(self, parts: Any) -> tuple[int, int]:
        depth, size = 1, 1
        for part in parts:
            if id(part) in self._owned:
                _, below, inside = self._owned[id(part)]
                depth, size = max(depth, below + 1), size + inside
            else:
                size += 1
        return depth, size

    def _own(self, value: Any, depth: int, size: int) -> None:
        if depth > MAX_DEPTH:
            self._refuse(f"it is nested more than {MAX_DEPTH} levels deep")
        if size > _EXPANSION * (self._length + 1):
            self._refuse("it repeats its parts too often")
        self._owned[id(value)] = value, depth, size

    def _use(self, value: Any) -> None:
        """Counts a value that is about to be copied, called with, or hashed."""
        _, _, size = self._owned.get(id(value), (value, 1, 1))
        self._used += size
        if self._used > _EXPANSION * (self._length + 1):
            self._refuse("it repeats its parts too often")

    def _seal(self, parts: Any) -> None:
        self._sealed.update(id(part) for part in parts if id(part) in self._owned)

    def _push(self, value: Any, parts: Any) -> None:
        self._own(value, *self._measure(parts))
        self._seal(parts)
        self._stack.append(value)

    def _push_tuple(self, parts: list[Any]) -> None:
        parts = [self._plain(part) for part in parts]
        self._push(tuple(parts), parts)

    def _grow(self, container: Any, parts: Any) -> None:
        """Registers new parts of a container that nothing contains yet."""
        if id(container) in self._sealed or any(part is container for part in parts):
            self._refuse("it changes a value that is already part of another")
        _, depth, size = self._owned[id(container)]
        below, more = self._measure(parts)
        self._own(container, max(depth, below), size + more)
        self._seal(parts)

    # Instructions.

    def _extend(self, items: list[Any], kind: type) -> None:
        container, items = self._stack[-1], [self._plain(item) for item in items]
        if kind is set:
            for item in items:
                self._require_key(container, item)
        if not isinstance(container, kind) and id(container) not in self._builds:
            self._refuse(f"it appends to {shown(container)}")
        self._grow(container, items)
        container.update(items) if isinstance(container, set) else container.extend(items)

    def _set_items(self, items: list[Any]) -> None:
        target, items = self._stack[-1], [self._plain(item) for item in items]
        if len(items) % 2:
            self._refuse("a dictionary's key has no value")
        if not isinstance(target, dict) and id(target) not in self._builds:
            self._refuse(f"it sets items of {shown(target)}")
        self._grow(target, items)
        for key, value in zip(items[::2], items[1::2]):
            self._require_key(target, key)
            target[key] = value

    def _require_key(self, container: Any, key: Any) -> None:
        """Hashing a nested tuple can take time exponential in its depth, or overflow the C stack; keys with one hash
        take time quadratic in their number."""
        self._use(key)
        for part in key if type(key) is tuple else (key,):
            if part is not None and not isinstance(part, (str, int, float, bytes, *self._keys)):
                self._refuse(f"a key is {shown(part)}, which no checkpoint needs")
            if isinstance(part, int) and not has_own_hash(part):
                self._refuse(f"a key is {shown(part)}, which no checkpoint needs")
        hashes, value = self._hashes.setdefault(id(container), Counter()), hash(key)
        hashes[value] += 1
        if hashes[value] > _COLLISIONS:
            self._refuse(f"more than {_COLLISIONS} keys of a dictionary or set have the same hash")

    def _push_global(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            self._refuse("a global has no name")
        full = f"{module}.{name}"
        if len(full) > _LONGEST_NAME or not full.isprintable():  # errors print it
            self._refuse(f"it references {shown(full)}, which is not a name")
        self._stack.append(_Reference(full, self._find(module, name)))

    def _call(self) -> None:
        arguments, function = self._pop(), self._pop()
        if not isinstance(function, _Reference) or not isinstance(arguments, tuple) or function.entry.make is None:
            called = function.name if isinstance(function, _Reference) else shown(function)
            self._refuse(f"it calls {called}, which no checkpoint needs")
        self._use(arguments)
        value = function.entry.make(*arguments)
        self._push(value, arguments)
        self._builds[id(value)] = function.entry.build

    def _build(self) -> None:
        state, target = self._plain(self._pop()), self._stack[-1]
        build = self._builds.get(id(target))
        if build is None:
            named = target.name if isinstance(target, _Reference) else shown(target)
            self._refuse(f"it sets attributes of {named}, which no checkpoint needs")
        self._grow(target, (state,))
        self._use(state)
        build(target, state)
