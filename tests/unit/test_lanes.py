"""The rules that put tests into lanes, engines and shards."""

import json
from pathlib import Path

import pytest

from tests.lanes import Times

pytest_plugins = "pytester"

TESTS = """
    import pytest

    @pytest.mark.parametrize("kind", ["a", "b", "c"])
    @pytest.mark.parametrize("label", ["paral_ddp", "paral_zero1", "paral_zero2"])
    def test_product(label, kind): pass

    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_sizes(world_size): pass

    @pytest.mark.parametrize("x", [1, pytest.param(2, marks=pytest.mark.lane("full"))])
    def test_table(x): pass

    @pytest.mark.parametrize("world_size", [1, 2, 4])
    @pytest.mark.parametrize("kind", ["a", "b", "c"])
    def test_long(world_size, kind): pass

    @pytest.mark.parametrize("x", range(6))
    def test_some(x): pass

    @pytest.mark.parametrize("x", range(6))
    def test_longest(x): pass

    @pytest.mark.lane("full")
    @pytest.mark.parametrize("x", range(6))
    def test_longest_promise(x): pass

    def test_slow(): pass

    @pytest.mark.lane("default")
    def test_slow_promise(): pass

    @pytest.mark.lane("default")
    def test_too_slow_promise(): pass

    @pytest.fixture
    def launch(): pass

    def test_launch(launch): pass

    @pytest.mark.deepspeed_operators
    def test_offload(): pass

    @pytest.mark.lane("all")
    def test_kill(): pass
"""
LANE_OF = """
    def pytest_collection_modifyitems(items, config):
        from tests import lanes
        from pathlib import Path
        times = lanes.Times(Path("times.json"))
        for lane in lanes.LANES:
            print(lane, sorted(item.name for item in lanes.select(items, lane, times)))
        for engine in lanes.ENGINES:
            print(engine, sorted(item.name for item in items if engine in lanes.engines_of(item)))
        for part in ("1/2", "2/2"):
            print(part, sorted(item.name for item in lanes.shard(items, times, part)))
"""


_said: dict[str, list[str]] = {}


@pytest.fixture
def said(pytester: pytest.Pytester) -> dict[str, list[str]]:
    """The names of the tests of each lane, engine and shard, which are found once."""
    if _said:
        return _said
    pytester.makeconftest(LANE_OF)
    pytester.makepyfile(test_one=TESTS, test_two="def test_slowest(): pass")
    pytester.makeini("[pytest]\nfilterwarnings = ignore::pytest.PytestWarning")
    times = {
        "test_one.py::test_long": 0.6,
        "test_one.py::test_some": 0.6,
        "test_one.py::test_longest": 3.2,
        "test_one.py::test_longest_promise": 3.2,
        "test_one.py::test_slow": 4.0,
        "test_one.py::test_slow_promise": 4.0,
        "test_one.py::test_too_slow_promise": 11.0,
        "test_two.py::test_slowest": 90.0,
    }
    Path("times.json").write_text(json.dumps(times | {"test_one.py::test_gone": 2.0}))
    lines = pytester.runpytest("--collect-only", "-q").outlines
    found = [line.partition(" ") for line in lines if " [" in line and "]" in line]
    _said.update({name: eval(names) for name, _, names in found})
    return _said


def test_each_value_is_in_the_default_lane_once_and_each_pair_in_the_full_lane(said) -> None:
    default = [name for name in said["default"] if name.startswith("test_product")]

    assert default == ["test_product[paral_ddp-a]", "test_product[paral_ddp-c]", "test_product[paral_zero2-b]"]
    assert sum(name.startswith("test_product") for name in said["full"]) == 9


def test_default_lane_leaves_out_other_world_sizes_slow_functions_and_launches(said) -> None:
    others = {name for name in said["default"] if not name.startswith("test_product")}

    long = {f"test_long[{kind}-2]" for kind in "abc"}
    some = {f"test_some[{x}]" for x in (0, 2, 4)}  # as many as fit into three seconds
    assert others == {"test_sizes[2]", "test_table[1]", "test_slow_promise", *long, *some}
    assert {"test_sizes[4]", "test_table[2]", "test_slow", "test_too_slow_promise", "test_launch"} <= set(said["full"])
    others_of_long = {f"test_long[{kind}-{size}]" for kind in "bc" for size in (1, 4)}
    others_of_longest = {f"test_longest[{x}]" for x in range(1, 6)}
    others_of_some = {f"test_some[{x}]" for x in (1, 3, 5)}
    others = {*others_of_some, *others_of_long, *others_of_longest}
    assert set(said["all"]) - set(said["full"]) == {"test_kill", "test_slowest", *others}


def test_functions_that_take_long_have_each_value_in_the_full_lane_instead_of_each_pair(said) -> None:
    full = [name for name in said["full"] if name.startswith("test_long[")]

    assert full == ["test_long[a-1]", "test_long[a-2]", "test_long[a-4]", "test_long[b-2]", "test_long[c-2]"]


def test_functions_that_take_longest_have_as_many_tests_in_the_full_lane_as_fit(said) -> None:
    assert [name for name in said["full"] if name.startswith("test_longest[")] == ["test_longest[0]"]
    assert sum(name.startswith("test_longest_promise") for name in said["full"]) == 6


def test_engine_is_found_by_parameters(said) -> None:
    assert all("zero" in name for name in said["zero"])
    assert len(said["zero"]) == 6
    assert len(said["ddp"]) == 3


def test_shards_have_all_tests_and_take_equally_long(said) -> None:
    assert sorted(said["1/2"] + said["2/2"]) == said["all"]
    assert said["1/2"] == ["test_slowest"]


def test_stale_times_are_a_warning(pytester: pytest.Pytester) -> None:
    Path("times.json").write_text(json.dumps({"tests/test_a.py::test_gone": 2.0}))

    with pytest.warns(pytest.PytestWarning, match=r"test_gone.*--write-times"):
        Times(Path("times.json")).warn_if_stale(["tests/test_a.py::test_new"])
