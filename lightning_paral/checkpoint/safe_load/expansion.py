"""How long it takes to walk through what a pickle describes, which may refer to itself or to one thing many times."""

from typing import Any

from lightning_paral.checkpoint.safe_load.opcodes import FREE_CONTAINERS, Made, PickleError

_MAX_DEPTH = 100
_EXPANSION = 64
_CONTAINERS = (dict, list, tuple, Made)


def _children(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return value.values()
    if kind in (list, tuple):
        return value
    if kind is Made:
        return (*value.args, value.state, *value.items.values())
    return ()


def check_expansion(root: Any, nbytes: int) -> None:
    """Raise a `PickleError` if walking through `root`, of a pickle of `nbytes`, never ends, goes deep or takes long.

    What is referred to twice is walked through twice by what comes after, and with it what it refers to.
    """
    limit = _EXPANSION * nbytes + FREE_CONTAINERS
    steps: dict[int, tuple[int, int]] = {}  # of what was walked through: how many, and how deep
    open_now: set[int] = set()
    path: list[tuple[Any, bool]] = [(root, False)]
    while path:
        value, done = path.pop()
        if type(value) not in _CONTAINERS:
            continue
        if done:
            found = [steps[id(child)] for child in _children(value) if type(child) in _CONTAINERS]
            count = 1 + len(_children(value)) + sum(number for number, _ in found)
            depth = 1 + max((deep for _, deep in found), default=0)
            if count > limit or depth > _MAX_DEPTH:
                raise PickleError("its pickle is nested deeper, or refers to itself more often, than any checkpoint")
            steps[id(value)] = (count, depth)
            open_now.discard(id(value))
        elif id(value) in open_now:
            raise PickleError("its pickle holds itself")
        elif id(value) not in steps:
            open_now.add(id(value))
            path.append((value, True))
            path.extend((child, False) for child in _children(value))
