"""The three lanes of the tests, the tests of one engine, and the shards of CI: by rule, from parameters and times.

`pytest` runs the lane "default", what a newcomer runs; `--lane full` is what CI runs; `--lane all` is everything. A
lane includes the ones before it. `places_of` says how an item gets its lane.
"""

import itertools
import json
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import pytest

from tests.compile_operators import needs_operators

LANES = ("default", "full", "all")
ENGINES = ("dp", "ddp", "fsdp", "zero", "tensor", "pipeline")
TIMES = Path(__file__).with_name("times.json")
"""The mean seconds of a test of each function that takes long. `pytest --lane all --write-times` writes it."""
LANE_SECONDS = 3.0
"""A function has as many tests in the lane default as fit into this time. In the lane full it has each pair of values
once if that fits, or else as many tests with other values as fit, but at least one, unless it is marked for a lane."""
PROMISE_SECONDS = 10.0
"""A function that is marked for a lane may take longer than others. If a test takes longer than this, it is at least in
the lane full if it is marked, and in the lane all if not."""
_FOLDERS = {
    "tests/gpu/": "all",
    "tests/distributed/faults/": "all",
    "tests/docs/": "full",
    "tests/distributed/elastic/": "full",
    "tests/distributed/examples/": "full",
    "tests/distributed/hangs/": "full",
    "tests/distributed/hugging_face/": "full",
    "tests/distributed/launch/": "full",
}
"""Folders whose tests start processes or wait: they are not in the lanes before the given one."""
_SIZES = ("world_size", "num_ranks", "size")
_STRATEGY = re.compile(r"(?<![a-z])(dp|ddp|fsdp|zero|pp|tp)(?![a-z])([123]?)")
"""A strategy in an ID of parameters, such as "paral_zero2_offload", "fsdp_tp" and "ddp, finding unused"."""
_OTHERS_SECONDS = 0.02


class Times:
    """The mean seconds of a test of each function that takes at least a second in all; of others, a guess."""

    def __init__(self, path: Path = TIMES) -> None:
        self.path = path
        self.stored: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, function: str) -> float:
        """Return the mean seconds of a test of `function`."""
        return self.stored.get(function, _OTHERS_SECONDS)

    def gone(self, functions: Iterable[str]) -> list[str]:
        """Return the stored functions that do not exist, of the files of `functions` and of files that do not exist."""
        found = set(functions)
        files = {function.partition("::")[0] for function in found}
        root = TIMES.parents[1]
        file_of = {name: name.partition("::")[0] for name in self.stored if name not in found}
        return [name for name, file in file_of.items() if file in files or not (root / file).exists()]

    def warn_if_stale(self, functions: Iterable[str]) -> None:
        """Warn about stored functions that do not exist."""
        if gone := self.gone(functions):
            warnings.warn(
                f"tests/times.json is stale: it has {len(gone)} functions that do not exist, such as {gone[0]}. "
                "`pytest --lane all --write-times` writes it again.",
                pytest.PytestWarning,
                stacklevel=2,
            )

    def write(self, seconds: Mapping[str, Sequence[float]], existing: Iterable[str]) -> None:
        """Replace the times of the functions that have run; drop those that take little, and those that are gone."""
        now = Times(self.path)
        dropped = {*seconds, *now.gone(existing)}
        kept = {name: value for name, value in now.stored.items() if name not in dropped}
        kept |= {name: round(sum(each) / len(each), 3) for name, each in seconds.items() if sum(each) >= 1.0}
        self.path.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")


def function_of(item: pytest.Item) -> str:
    """Return the ID of an item's function, without parameters."""
    return item.nodeid.partition("[")[0]


def select(items: Sequence[pytest.Item], lane: str, times: Times, engine: str | None = None) -> list[pytest.Item]:
    """Return the items of a lane.

    Args:
        items: all items.
        lane: one of `LANES`.
        times: the stored times.
        engine: leave out what is not about this engine; the full lane then has whole columns of tables.
    """
    places = places_of(items, times)
    chosen = [item for item in items if places[item] <= LANES.index(lane)]
    if engine is None:
        return chosen
    in_lane = set(chosen)
    return [
        item
        for item in items
        if engine in engines_of(item) and (item in in_lane or (lane == "full" and _mark_of_parameter(item)))
    ]


def places_of(items: Sequence[pytest.Item], times: Times) -> dict[pytest.Item, int]:
    """Return the first lane that has each item, as an index of `LANES`.

    1. A parameter with `pytest.mark.lane(NAME)` is in that lane: tables choose their cells.
    2. Of a function with several parameters, the default lane has each value once, and the full lane each pair of
       values. Values of other world sizes than 2 are not in the default lane, nor is ZeRO-1 beside ZeRO-2, whose code
       it shares.
    3. Tests that need DeepSpeed's operators are in the full lane.
    4. Tests that start processes or wait, judged by folder and fixture, are in the full lane at first, or in "all".
    5. A function that takes long, by the times of `tests/times.json`, has fewer tests in a lane: see `LANE_SECONDS`.
    6. A test that takes longer than `PROMISE_SECONDS` is in the lane all, and in the lane full if it is marked.

    A function with `pytest.mark.lane(NAME)` is in that lane instead of by rule 4 and by `LANE_SECONDS`.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[function_of(item)].append(item)
    times.warn_if_stale(functions)
    places = {}
    for function, members in functions.items():
        seconds = times.of(function)
        own = [item for item in members if _mark_of_parameter(item) is None]
        usual, once, pairwise = cover(own)
        first = [item for item in members if item in usual]
        fitting = _fitting(first, int(LANE_SECONDS / seconds))
        full = once if seconds * len(pairwise) > LANE_SECONDS else pairwise
        if seconds * len(full) > LANE_SECONDS and own[0].get_closest_marker("lane") is None:
            count = max(1, int(LANE_SECONDS / seconds))
            full = {*fitting, *_fitting([item for item in own if item in once], count)}
        for item in members:
            mark = _mark_of_parameter(item)
            if mark is not None:
                least = max(LANES.index(mark.args[0]), int(needs_operators(item)))
            else:
                product = 2 if item not in full else 0 if item in usual else 1
                least = max(product, _least_lane(item, item in fitting))
            if seconds > PROMISE_SECONDS:
                least = max(least, 2 if item.get_closest_marker("lane") is None else 1)
            places[item] = least
    return places


def _fitting(items: Sequence[pytest.Item], count: int) -> Sequence[pytest.Item]:
    """Return at most `count` of the items, spread over them."""
    return items[:: max(1, ceil(len(items) / count))] if count else []


def _least_lane(item: pytest.Item, is_fitting: bool) -> int:
    mark = item.get_closest_marker("lane")
    if mark is not None:
        return max(LANES.index(mark.args[0]), int(needs_operators(item)))
    folder = next((lane for folder, lane in _FOLDERS.items() if item.nodeid.startswith(folder)), "default")
    waits = not is_fitting or needs_operators(item) or "launch" in getattr(item, "fixturenames", ())
    return max(LANES.index(folder), int(waits))


def _mark_of_parameter(item: pytest.Item) -> Any:
    marks = item.callspec.marks if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return next((mark for mark in marks if mark.name == "lane"), None)


def cover(items: Sequence[pytest.Item]) -> tuple[set[pytest.Item], set[pytest.Item], set[pytest.Item]]:
    """Return the items that have each usual value once, each value once, and each pair of values once."""
    factors = {item: tuple((name, repr(value)) for name, value in _parameters(item).items()) for item in items}
    if not items or len(factors[items[0]]) == 0:
        return set(items), set(items), set(items)
    rare_stages = {1} if any(2 in _stages(item) for item in items) else set()
    usual = [item for item in items if _is_usual(item) and not _stages(item) & rare_stages] or list(items)
    first = _greedy(usual, factors, 1)
    return first, _greedy(items, factors, 1, first), _greedy(items, factors, 2, first)


def _greedy(
    items: Sequence[pytest.Item], factors: dict[pytest.Item, Any], size: int, chosen: Iterable[pytest.Item] = ()
) -> set[pytest.Item]:
    """Return `chosen`, and items until each combination of `size` values that `items` have is there."""
    parts = {item: set(itertools.combinations(factors[item], min(size, len(factors[item])))) for item in items}
    missing = set().union(*parts.values())
    if sum(map(len, parts.values())) == len(missing):  # one factor, or none in common
        return set(items)
    found = set(chosen)
    missing -= set().union(*(parts[item] for item in found))
    while missing:
        best = max(items, key=lambda item: len(parts[item] & missing))  # the first of equals
        found.add(best)
        missing -= parts[best]
    return found


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


def _is_usual(item: pytest.Item) -> bool:
    parameters = _parameters(item)
    sizes = {parameters[name] for name in _SIZES if name in parameters}
    return sizes <= {2} and not needs_operators(item)


def _stages(item: pytest.Item) -> set[Any]:
    """Return the ZeRO stages among the parameters."""
    return {_parameters(item).get("stage"), *(int(stage or 0) for name, stage in _strategies(item) if name == "zero")}


def engines_of(item: pytest.Item) -> set[str]:
    """Return the engines that the item is about, by its folder and its parameters."""
    parts = set(item.nodeid.partition("::")[0].split("/"))
    named = {engine for name, _ in _strategies(item) for engine in _ENGINES_OF.get(name, (name,))}
    return {engine for engine in ENGINES if engine in parts} | named


_ENGINES_OF = {"pp": ("pipeline",), "tp": ("tensor", "fsdp")}


def _strategies(item: pytest.Item) -> list[tuple[str, str]]:
    """Return the names of strategies in the ID of the parameters, and their ZeRO stages."""
    return _STRATEGY.findall(item.nodeid.partition("[")[2])


def shard(items: Sequence[pytest.Item], times: Times, part: str) -> list[pytest.Item]:
    """Return the items of one of several parts that take equally long, such as `"1/2"`. Files stay whole."""
    number, count = map(int, part.split("/"))
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        seconds[item.nodeid.partition("::")[0]] += times.of(function_of(item))
    totals = [0.0] * count
    part_of = {}
    for file in sorted(seconds, key=lambda file: (-seconds[file], file)):
        part_of[file] = totals.index(min(totals))
        totals[part_of[file]] += seconds[file]
    return [item for item in items if part_of[item.nodeid.partition("::")[0]] == number - 1]
