"""Read pickles as data: nothing in them is imported, called or created.

This is Python's own unpickler with few opcodes, and with stand-ins for globals and for the results of calls. Memory is
bounded by the size of the pickle.
"""

import io
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

from lightning_paral.compat.torch.tensors import PythonUnpickler

_COPIES = 4  # elements that calls may copy per byte of the pickle
_BYTES_PER_CONTAINER = 4
_FREE = 1000
"""What a pickle of any size may have: containers, and steps of a traversal."""
_MAX_DEPTH = 100
_EXPANSION = 64  # steps that a traversal may take per byte of the pickle


class PickleError(Exception):
    """A pickle is damaged, contains something that is not allowed, or takes too much time or memory for its size."""


class RefusedError(PickleError):
    """A pickle refers to the global `name`, which is not allowed."""

    def __init__(self, name: str) -> None:
        super().__init__(f"it refers to {name}")
        self.name = name


@dataclass(frozen=True)
class Named:
    """A global that a pickle refers to."""

    name: str


@dataclass(eq=False, repr=False, slots=True)
class Made:
    """The result of calling the global `by` with `args`, and then setting its `state` and `items`."""

    by: str
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{self.by}>"  # without the parts, which may refer to the same objects again and again


class PickleReader(PythonUnpickler):  # type: ignore[misc]
    """Reads a pickle. Subclasses decide which globals, calls and states it may contain."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._left = _FREE + len(data) // _BYTES_PER_CONTAINER
        self._copied_left = _FREE + _COPIES * len(data)

    def read_all(self) -> Any:
        """Return the object in the pickle: plain data, and stand-ins.

        Raises:
            PickleError: the pickle is damaged, contains something that is not allowed, or is too costly for its size.
        """
        try:
            return self.load()
        except PickleError:
            raise
        except Exception as error:  # Python's unpickler raises any error for a pickle that no pickler writes
            raise PickleError(f"its pickle is damaged or not allowed ({type(error).__name__}: {error})") from error

    def find_class(self, module: str, name: str) -> Named:
        """Return a stand-in for a global. Raise a `PickleError` if it is not allowed."""
        return Named(f"{module}.{name}")

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return a stand-in for the result of a call. Raise a `PickleError` if the call is not allowed."""
        return Made(name, args)

    def check_state(self, target: Made, state: Any) -> None:
        """Raise a `PickleError` for a state that `target` cannot have."""

    def may_be_key(self, made: Made) -> bool:
        """Return whether the result of a call may be a key in a dict or set."""
        return True

    def count(self, number: int = 1) -> None:
        """Take `number` new containers from those that a pickle of this size may have."""
        self._left -= number
        if self._left < 0:
            raise PickleError("its pickle has too many containers for its size")

    def check_keys(self, keys: Iterable[Any]) -> None:
        """Raise a `PickleError` for keys that are not plain values or tuples of them.

        Nested tuples would take exponential time to hash.
        """
        for key in keys:
            for part in key if type(key) is tuple else (key,):
                if type(part) not in _KEYS and not (type(part) is Made and self.may_be_key(part)):
                    raise PickleError(f"its pickle has the key {short(part)}, which is of another type")

    # Opcodes

    def _load_call(self) -> None:
        args, callee = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple or type(callee) is not Named:
            raise PickleError(f"its pickle calls a {type(callee).__name__}, which is not a function")
        self._count_copied(args)
        self.append(self.call(callee.name, args))

    def _load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Made or target.state is not None:
            raise PickleError(f"its pickle sets attributes of a {type(target).__name__}, which is not allowed")
        self._count_copied(state if type(state) is tuple else (state,))
        self.check_state(target, state)
        target.state = state

    def _count_copied(self, parts: tuple[Any, ...]) -> None:
        """Count what a call or a state may copy, because a small pickle can name one large value many times."""
        self._copied_left -= sum(len(part) for part in parts if type(part) in _SIZED)
        if self._copied_left < 0:
            raise PickleError("its pickle copies the same values too often")

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Made and target.by in ("collections.OrderedDict", "collections.Counter"):
            target = target.items
        if type(target) is not dict:
            raise PickleError(f"its pickle sets items of a {type(target).__name__}")
        self.check_keys(items[::2])
        target.update(zip(items[::2], items[1::2], strict=True))


_SIZED = (str, bytes, list, tuple, dict, set, frozenset)
_KEYS = (str, int, bytes, float, bool, type(None), Named)
_Opcode = Callable[[Any], None]


def _counted(load: _Opcode) -> _Opcode:
    def count(reader: PickleReader) -> None:
        reader.count()
        load(reader)

    return count


def opcodes(names: str) -> dict[int, _Opcode]:
    """Return what Python's unpickler does for opcodes, by code."""
    return {code: PythonUnpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in names.split())}


_CREATING = opcodes("MARK EMPTY_LIST EMPTY_DICT TUPLE TUPLE1 TUPLE2 TUPLE3 BINPERSID")
_CREATING |= dict.fromkeys((pickle.REDUCE[0], pickle.NEWOBJ[0]), PickleReader._load_call)
PickleReader.dispatch = {  # the opcodes that `torch.save` writes and `torch.load` reads
    **opcodes("PROTO STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE EMPTY_TUPLE"),
    **opcodes("BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL APPEND APPENDS"),
    **{code: _counted(load) for code, load in _CREATING.items()},
    pickle.BUILD[0]: PickleReader._load_build,
    pickle.SETITEM[0]: PickleReader._load_setitem,
    pickle.SETITEMS[0]: lambda reader: reader._set_items(reader.pop_mark()),
}


def check_expansion(root: Any, nbytes: int) -> None:
    """Raise a `PickleError` if traversing `root` would not end, or would take too many steps for a pickle of `nbytes`.

    Code that traverses the tree visits an object that is referenced twice, and everything below it, twice. A small
    pickle of nested references can therefore take exponential time.
    """
    limit = _EXPANSION * nbytes + _FREE
    known: dict[int, tuple[int, int]] = {}

    def measure(value: Any, level: int) -> tuple[int, int]:
        """Return the number of steps and the depth of `value`."""
        if id(value) not in known:
            if level > _MAX_DEPTH:
                raise PickleError(f"its pickle is nested more than {_MAX_DEPTH} deep, or contains itself")
            known[id(value)] = (limit, 0)  # which a value that contains itself exceeds
            children = value.values() if type(value) is dict else value
            if type(value) is Made:
                children = (*value.args, value.state, *value.items.values())
            found = [measure(child, level + 1) for child in children if type(child) in (dict, list, tuple, Made)]
            steps = 1 + len(children) + sum(number for number, _ in found)
            depth = 1 + max((depth for _, depth in found), default=0)
            if steps > limit or depth > _MAX_DEPTH:
                raise PickleError("its pickle contains itself, is nested too deeply, or repeats references too often")
            known[id(value)] = (steps, depth)
        return known[id(value)]

    measure([root], 0)
