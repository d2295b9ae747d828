"""The three lanes of the tests, the tests of one engine, and the shards of CI: by rule, from parameters and times.

`pytest` runs the lane "default", what a newcomer runs; `--lane full` is what CI runs; `--lane all` is everything. A
lane includes the ones before it. `places_of` says how an item gets its lane.
"""

import itertools
import json
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lightning.pytorch.strategies import Strategy

from lightning_paral import (
    ParalDDPStrategy,
    ParalDPStrategy,
    ParalFSDPStrategy,
    ParalPipelineStrategy,
    ParalZeROStrategy,
)
from lightning_paral.registry import STRATEGIES
from tests.compile_operators import operators_of
from tests.contract.cases import BY_LABEL

LANES = ("default", "full", "all")
ENGINES = ("dp", "ddp", "fsdp", "zero", "tensor", "pipeline")
TIMES = Path(__file__).with_name("times.json")
"""The mean seconds of a test of each function that takes long. `pytest --lane all --write-times` writes it."""
SLOW_SECONDS = 3.0
"""The time of a function's tests in the default lane from which on they move to the full lane."""
LONG_SECONDS = 15.0
"""The time of a function's tests in the full lane from which on it has each value once, instead of each pair."""
LONGEST_SECONDS = 40.0
"""The time of a function's tests in the full lane from which on they move to the lane "all"."""
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
_SIZES = ("world_size", "num_ranks")
_OTHERS_SECONDS = 0.02


class Times:
    """The mean seconds of a test of each function that takes at least a second in all; of others, a guess."""

    def __init__(self, path: Path = TIMES) -> None:
        self.path = path
        self.stored: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def of(self, function: str) -> float:
        """Return the mean seconds of a test of `function`."""
        return self.stored.get(function, _OTHERS_SECONDS)

    def warn_if_stale(self, functions: Iterable[str]) -> None:
        """Warn about stored functions in the collected files that do not exist any more."""
        found = set(functions)
        files = {function.partition("::")[0] for function in found}
        gone = [name for name in self.stored if name not in found and name.partition("::")[0] in files]
        if gone:
            warnings.warn(
                f"tests/times.json is stale: it has {len(gone)} functions that do not exist, such as {gone[0]}. "
                "`pytest --lane all --write-times` writes it again.",
                pytest.PytestWarning,
                stacklevel=2,
            )

    def write(self, seconds: dict[str, list[float]]) -> None:
        """Replace the times of the functions that have run, and drop those that take little."""
        kept = {name: value for name, value in Times(self.path).stored.items() if name not in seconds}
        kept |= {name: round(sum(each) / len(each), 3) for name, each in seconds.items() if sum(each) >= 1.0}
        self.path.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")


def function_of(item: pytest.Item) -> str:
    """Return the ID of an item's function, without parameters."""
    return item.nodeid.partition("[")[0]


def select(items: Sequence[pytest.Item], lane: str, times: Times) -> list[pytest.Item]:
    """Return the items of a lane. "versions" has each value once, also of tests that take long: for CI's oldest set."""
    places = places_of(items, times)
    if lane == "versions":
        return [item for item in items if places[item].product == 0 and places[item].least < 2]
    return [item for item in items if max(places[item]) <= LANES.index(lane)]


class Place(NamedTuple):
    """The first lane of an item by its parameters, and the first lane of its function, as indices of `LANES`."""

    product: int
    least: int


def places_of(items: Sequence[pytest.Item], times: Times) -> dict[pytest.Item, Place]:
    """Return the place of each item.

    1. A parameter with `pytest.mark.lane(NAME)` is in that lane: tables choose their cells.
    2. Of a function with several parameters, the default lane has each value once, and the full lane each pair of
       values. Values of other world sizes than 2, and of ZeRO stages before 3, are not in the default lane.
    3. Tests that need DeepSpeed's operators are in the full lane.
    4. Tests that start processes or wait, judged by folder and fixture, are in the full lane at first, or in "all".
    5. Functions that took long, by the times of `tests/times.json`, move to the next lane: see `SLOW_SECONDS`,
       `LONG_SECONDS` and `LONGEST_SECONDS`.

    A function with `pytest.mark.lane(NAME)` is in that lane instead of by rules 4 and 5.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[function_of(item)].append(item)
    times.warn_if_stale(functions)
    places = {}
    for function, members in functions.items():
        free = [item for item in members if _mark_of_parameter(item) is None]
        once, pairwise = cover(free)
        seconds = times.of(function)
        by_time = int(seconds * len(once) > SLOW_SECONDS) + int(seconds * len(once) > LONGEST_SECONDS)
        pairwise = once if seconds * len(pairwise) > LONG_SECONDS else pairwise
        for item in members:
            mark = _mark_of_parameter(item)
            if mark is not None:
                places[item] = Place(LANES.index(mark.args[0]), int(bool(operators_of(item))))
            else:
                product = 0 if item in once else 1 if item in pairwise else 2
                places[item] = Place(product, _least_lane(item, by_time))
    return places


def _least_lane(item: pytest.Item, by_time: int) -> int:
    mark = item.get_closest_marker("lane")
    if mark is not None:
        return max(LANES.index(mark.args[0]), int(bool(operators_of(item))))
    folder = next((lane for folder, lane in _FOLDERS.items() if item.nodeid.startswith(folder)), "default")
    waits = bool(operators_of(item)) or "launch" in getattr(item, "fixturenames", ())
    return max(LANES.index(folder), int(waits), by_time)


def _mark_of_parameter(item: pytest.Item) -> Any:
    marks = _callspec(item, "marks", ())
    return next((mark for mark in marks if mark.name == "lane"), None)


def _callspec(item: pytest.Item, attribute: str, default: Any) -> Any:
    return getattr(getattr(item, "callspec", None), attribute, default)


def cover(items: Sequence[pytest.Item]) -> tuple[set[pytest.Item], set[pytest.Item]]:
    """Return the items that have each value of each parameter once, and those that have each pair of values once."""
    factors = {item: tuple((name, repr(value)) for name, value in _parameters(item).items()) for item in items}
    if not items or len(factors[items[0]]) == 0:
        return set(items), set(items)
    usual = [item for item in items if not _is_unusual(item)] or list(items)
    return _greedy(usual, factors, 1), _greedy(items, factors, 2)


def _greedy(items: Sequence[pytest.Item], factors: dict[pytest.Item, Any], size: int) -> set[pytest.Item]:
    parts = {item: set(itertools.combinations(factors[item], min(size, len(factors[item])))) for item in items}
    missing = set().union(*parts.values())
    if sum(map(len, parts.values())) == len(missing):  # one factor, or none in common
        return set(items)
    chosen = set()
    while missing:
        best = max(items, key=lambda item: len(parts[item] & missing))  # the first of equals
        chosen.add(best)
        missing -= parts[best]
    return chosen


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return _callspec(item, "params", {})


def _is_unusual(item: pytest.Item) -> bool:
    parameters = _parameters(item)
    sizes = [parameters[name] for name in _SIZES if name in parameters]
    stages = {stage for _, stage in _strategies(parameters) if stage}
    stages |= {parameters["stage"]} if isinstance(parameters.get("stage"), int) else set()
    return any(size != 2 for size in sizes) or bool(stages and max(stages) < 3)


def engines_of(item: pytest.Item) -> set[str]:
    """Return the engines that the item is about, by its folder and its parameters."""
    parts = set(item.nodeid.partition("::")[0].split("/"))
    return {engine for engine in ENGINES if engine in parts} | {engine for engine, _ in _strategies(_parameters(item))}


def _strategies(parameters: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Return the engine of each strategy among the parameters, and its ZeRO stage, or 0."""
    for value in _flat(parameters.values()):
        if isinstance(value, str) and value in BY_LABEL:
            case = BY_LABEL[value]
            options = case.options() if callable(case.options) else case.options
            yield from _engines(case.type, {**_ARGUMENTS.get(value, {}), **options})
        elif isinstance(value, str) and value in _ARGUMENTS:
            yield from _engines(_CLASSES[value], _ARGUMENTS[value])
        elif isinstance(value, Strategy) or (isinstance(value, type) and issubclass(value, Strategy)):
            kind = value if isinstance(value, type) else type(value)
            yield from _engines(kind, {"stage": getattr(getattr(value, "options", None), "stage", 0)})


_ENGINE_OF = {
    ParalDPStrategy: "dp",
    ParalDDPStrategy: "ddp",
    ParalFSDPStrategy: "fsdp",
    ParalPipelineStrategy: "pipeline",
    ParalZeROStrategy: "zero",
}
_CLASSES = {entry.name: entry.strategy for entry in STRATEGIES}
_ARGUMENTS = {entry.name: dict(entry.arguments) for entry in STRATEGIES}


def _engines(kind: type, options: dict[str, Any]) -> Iterator[tuple[str, int]]:
    engine = next((name for base, name in _ENGINE_OF.items() if issubclass(kind, base)), None)
    if engine is not None:
        yield engine, options.get("stage", 0) if engine == "zero" else 0
    if options.get("tensor_parallel"):
        yield "tensor", 0


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def shard(items: Sequence[pytest.Item], times: Times, parts: str) -> list[pytest.Item]:
    """Return the items of some of several parts that take equally long, such as `"1,2/3"`. Files stay whole."""
    numbers, _, count = parts.partition("/")
    seconds: dict[str, float] = defaultdict(float)
    for item in items:
        seconds[_file(item)] += times.of(function_of(item))
    totals = [0.0] * int(count)
    part_of = {}
    for file in sorted(seconds, key=lambda file: (-seconds[file], file)):
        part_of[file] = totals.index(min(totals))
        totals[part_of[file]] += seconds[file]
    chosen = {int(number) - 1 for number in numbers.split(",")}
    return [item for item in items if part_of[_file(item)] in chosen]


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
