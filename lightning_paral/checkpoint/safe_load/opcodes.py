"""Interpret pickles as data, without importing, calling or instantiating anything.

Globals and the results of calls are represented by `Named` and `Made`, if the rules allow them. Time and memory are
bounded by the size of the pickle. Follows https://docs.python.org/3/library/pickletools.html.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, Protocol

_MAX_KEY_DEPTH = 4
_BYTES_PER_CONTAINER = 4
FREE_CONTAINERS = 1000
"""Number of containers that a pickle of any size may have. Each `_BYTES_PER_CONTAINER` bytes allow one more."""
_LARGE_INT = 2**61 - 1  # the hashes of larger integers can collide, so that a dict of them takes quadratic time


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


@dataclass(eq=False)
class Made:
    """The result of calling the global `by` with `args`, and then setting its `state` and `items`."""

    by: str
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


class Rules(Protocol):
    """Decides which globals, calls and states a pickle may contain. Each method raises a `PickleError` for others."""

    def find_global(self, module: str, name: str) -> Any:
        """Return a stand-in for a global."""

    def call(self, callee: Named, args: tuple[Any, ...]) -> Any:
        """Return a stand-in for the result of a call."""

    def build(self, target: Made, state: Any) -> None:
        """Check a state that is about to be set on `target`, which has no state yet."""

    def persistent_load(self, identity: Any) -> Any:
        """Return a stand-in for an object that is stored outside the pickle."""


_MARK = object()
_UINT8, _UINT16, _INT32 = Struct("<B"), Struct("<H"), Struct("<i")
_UINT32, _UINT64, _FLOAT = Struct("<I"), Struct("<Q"), Struct(">d")


def interpret(data: bytes, rules: Rules) -> Any:
    """Return the object in the pickle `data`: plain data, `Named`, `Made`, and stand-ins returned by `rules`.

    Raises:
        PickleError: the pickle is damaged, contains something that `rules` do not allow, or is too expensive for its
            size.
    """
    machine = _Machine(data, rules)
    try:
        return machine.run()
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PickleError(f"its pickle is truncated or damaged at byte {machine.at} ({error!r})") from error


class _Machine:
    def __init__(self, data: bytes, rules: Rules) -> None:
        self.data = data
        self.rules = rules
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        """The stack below each open mark."""
        self.memo: dict[int, Any] = {}
        self.left = FREE_CONTAINERS + len(data) // _BYTES_PER_CONTAINER
        """How many more containers the pickle may create."""

    def run(self) -> Any:
        data, memo, handlers = self.data, self.memo, _HANDLERS
        while True:
            code = data[self.at]
            self.at += 1
            if code == 0x94:  # the most frequent opcodes first: MEMOIZE, BINGET, BININT1, STOP
                memo[len(memo)] = self.stack[-1]
            elif code == 0x68:
                self.stack.append(memo[data[self.at]])
                self.at += 1
            elif code == 0x4B:
                self.stack.append(data[self.at])
                self.at += 1
            elif code == 0x2E:
                if len(self.stack) != 1 or self.below:
                    raise PickleError("its pickle is damaged: it leaves more than one object")
                return self.stack[0]
            else:
                handler = handlers[code]
                if handler is None:
                    raise PickleError(
                        f"its pickle has the opcode {code:#x} at byte {self.at - 1}, which is not allowed"
                    )
                handler(self)

    # Operands

    def number(self, form: Struct) -> Any:
        (value,) = form.unpack_from(self.data, self.at) if self.at + form.size <= len(self.data) else (None,)
        if value is None:
            raise PickleError("its pickle is truncated")
        self.at += form.size
        return value

    def bytes(self, form: Struct) -> bytes:
        length = self.number(form)
        if length < 0 or length > len(self.data) - self.at:
            raise PickleError(f"its pickle asks for {length} bytes when {len(self.data) - self.at} are left")
        self.at += length
        return self.data[self.at - length : self.at]

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        line = self.data[self.at : end].decode()
        self.at = end + 1
        return line

    def pop(self) -> Any:
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.below.pop()
        return items

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def push_new(self, value: Any) -> None:
        """Push a new object, which counts as a container."""
        self.left -= 1
        if self.left < 0:
            raise PickleError("its pickle has too many containers for its size")
        self.stack.append(value)

    # What opcodes do

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def push_tuple(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) != count:
            raise PickleError("its pickle is damaged: its stack has too few objects")
        del self.stack[-count:]
        self.push_new(items)

    def push_global(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise PickleError("its pickle has a global whose name is not a string")
        self.push(self.rules.find_global(module, name))

    def push_stack_global(self) -> None:
        name, module = self.pop(), self.pop()
        self.push_global(module, name)

    def call(self) -> None:
        args, callee = self.pop(), self.pop()
        if type(args) is not tuple or type(callee) is not Named:
            raise PickleError(f"its pickle calls a {type(callee).__name__}, which is not a function")
        self.push_new(self.rules.call(callee, args))

    def build(self) -> None:
        state, target = self.pop(), self.stack[-1]
        if type(target) is not Made or target.state is not None:
            raise PickleError(f"its pickle sets attributes of {_describe(target)}, which is not allowed")
        self.rules.build(target, state)
        target.state = state

    def push_persistent(self) -> None:
        self.push_new(self.rules.persistent_load(self.pop()))

    def remember(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise PickleError(f"its pickle appends to {_describe(target)}")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is Made and target.by in _MAPPINGS:
            target = target.items
        if type(target) is not dict or len(items) % 2:
            raise PickleError(f"its pickle sets items of {_describe(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            check_key(key)
            target[key] = value

    def add_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not set:
            raise PickleError(f"its pickle adds to {_describe(target)}")
        for item in items:
            check_key(item)
            target.add(item)

    def push_frozenset(self) -> None:
        items = self.pop_mark()
        for item in items:
            check_key(item)
        self.push_new(frozenset(items))


_MAPPINGS = ("collections.OrderedDict", "collections.Counter")


def check_key(key: Any, depth: int = 0) -> None:
    """Raise a `PickleError` for a key that is not a plain value, is slow to hash, or may be chosen to collide."""
    if type(key) is tuple and depth < _MAX_KEY_DEPTH:
        for item in key:
            check_key(item, depth + 1)
    elif type(key) is int:
        if not -_LARGE_INT < key < _LARGE_INT:
            raise PickleError("its pickle has integer keys that are too large")
    elif type(key) not in (str, bytes, float, bool, type(None), frozenset, complex, Made, Named):
        raise PickleError(f"its pickle has {_describe(key)} as a key")


def _describe(value: Any) -> str:
    return value.name if type(value) is Named else value.by if type(value) is Made else f"a {type(value).__name__}"


def _pop_twice(machine: _Machine) -> list[Any]:
    value, key = machine.pop(), machine.pop()
    return [key, value]


_Handler = Callable[[_Machine], Any]
_OPCODES: dict[int, _Handler] = {
    0x80: lambda m: m.number(_UINT8),  # PROTO
    0x95: lambda m: m.number(_UINT64),  # FRAME, which does not change what follows
    0x28: _Machine.mark,
    0x30: _Machine.pop,
    0x31: _Machine.pop_mark,
    0x4E: lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    0x4A: lambda m: m.push(m.number(_INT32)),
    0x4D: lambda m: m.push(m.number(_UINT16)),
    0x8A: lambda m: m.push(int.from_bytes(m.bytes(_UINT8), "little", signed=True)),  # LONG1
    0x47: lambda m: m.push(m.number(_FLOAT)),
    0x58: lambda m: m.push(m.bytes(_UINT32).decode("utf-8", "surrogatepass")),  # BINUNICODE
    0x8C: lambda m: m.push(m.bytes(_UINT8).decode("utf-8", "surrogatepass")),
    0x8D: lambda m: m.push(m.bytes(_UINT64).decode("utf-8", "surrogatepass")),
    0x55: lambda m: m.push(m.bytes(_UINT8).decode()),  # SHORT_BINSTRING
    0x43: lambda m: m.push(m.bytes(_UINT8)),  # SHORT_BINBYTES
    0x42: lambda m: m.push(m.bytes(_UINT32)),
    0x8E: lambda m: m.push(m.bytes(_UINT64)),
    0x5D: lambda m: m.push_new([]),
    0x7D: lambda m: m.push_new({}),
    0x29: lambda m: m.push(()),
    0x8F: lambda m: m.push_new(set()),
    0x74: lambda m: m.push_new(tuple(m.pop_mark())),  # TUPLE
    0x85: lambda m: m.push_tuple(1),
    0x86: lambda m: m.push_tuple(2),
    0x87: lambda m: m.push_tuple(3),
    0x61: lambda m: m.extend([m.pop()]),  # APPEND
    0x65: lambda m: m.extend(m.pop_mark()),
    0x73: lambda m: m.set_items(_pop_twice(m)),  # SETITEM
    0x75: lambda m: m.set_items(m.pop_mark()),
    0x90: lambda m: m.add_items(m.pop_mark()),
    0x91: _Machine.push_frozenset,
    0x71: lambda m: m.remember(m.number(_UINT8)),  # BINPUT
    0x72: lambda m: m.remember(m.number(_UINT32)),
    0x6A: lambda m: m.push(m.memo[m.number(_UINT32)]),
    0x63: lambda m: m.push_global(m.line(), m.line()),  # GLOBAL
    0x93: _Machine.push_stack_global,
    0x52: _Machine.call,  # REDUCE
    0x81: _Machine.call,  # NEWOBJ
    0x62: _Machine.build,
    0x51: _Machine.push_persistent,  # BINPERSID
}
_HANDLERS: list[_Handler | None] = [_OPCODES.get(code) for code in range(256)]
