"""The predicted time of a step: closed forms, limits, and errors."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from lightning_paral import ConfigurationError, Plan, plan
from lightning_paral.planning.following import FollowedSteps, follow_steps
from lightning_paral.planning.layout import LAYOUTS, Layout, layouts_of
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.time.machine import Machine
from lightning_paral.planning.time.options import MachineOptions
from lightning_paral.planning.time.passes import StepEvents
from lightning_paral.planning.time.step_time import step_seconds
from lightning_paral.planning.time.world_sizes import WORLD_SIZES, parse_world_sizes
from lightning_paral.quantities import parse_bandwidth, parse_flops, parse_seconds
from tests.unit.planning.models import bytes_of_text, gpt

FLOPS, LINK, LATENCY = 50e9, 125e6, 1e-3
SLOW = Machine(flops=FLOPS, link=LINK, latency=LATENCY)
ENDLESS = Machine(flops=FLOPS, link=math.inf, latency=0.0)
TRAINED = [layout for layout in LAYOUTS if layout.engine != "dp" and "nvme" not in layout.strategy]
ON_CUDA = [layout for layout in TRAINED if not layout.is_offloaded]
BOTH = [(layout, True) for layout in TRAINED] + [(layout, False) for layout in ON_CUDA]


@pytest.fixture(scope="module")
def followed() -> FollowedSteps:
    return follow_steps(lambda: gpt(128, 3), bytes_of_text(4), StepSettings())


def seconds_of(
    followed: FollowedSteps, layout: Layout, num_ranks: int, machine: Machine, *, on_cpu: bool = True, **settings: Any
) -> float:
    events = StepEvents(followed.plain)
    found = step_seconds(layout, events, followed.states, num_ranks, StepSettings(**settings), machine, on_cpu=on_cpu)
    assert found is not None
    return found


def named(name: str) -> Layout:
    return layouts_of([name])[0]


@pytest.mark.parametrize(("layout", "on_cpu"), BOTH)
def test_without_communication_a_step_takes_as_long_as_its_operations(
    followed: FollowedSteps, layout: Layout, on_cpu: bool
) -> None:
    for num_ranks, machine in ((1, SLOW), (2, ENDLESS), (7, ENDLESS), (4096, ENDLESS)):
        found = seconds_of(followed, layout, num_ranks, machine, on_cpu=on_cpu)
        assert found == pytest.approx(followed.plain.flops / FLOPS)
    assert seconds_of(followed, layout, 64, SLOW, on_cpu=on_cpu) > seconds_of(followed, layout, 4, SLOW, on_cpu=on_cpu)


def test_ddp_takes_as_long_as_its_all_reduces_if_computation_takes_no_time(followed: FollowedSteps) -> None:
    found = seconds_of(followed, named("paral_ddp"), 4, Machine(flops=math.inf, link=LINK, latency=LATENCY))

    assert found == pytest.approx(2 * 2 * 3 * LATENCY + 2 * 3 / 4 * followed.states.gradient_bytes / LINK)


def test_times_that_depend_on_other_links_are_unknown(followed: FollowedSteps) -> None:
    events = StepEvents(followed.plain)
    for name, on_cpu in (("paral_zero2_offload", False), ("paral_zero3_nvme", True), ("paral_dp", True)):
        found = step_seconds(named(name), events, followed.states, 2, StepSettings(), SLOW, on_cpu=on_cpu)
        assert found is None


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(
        gpt(128, 3), bytes_of_text(4), 4, "16GiB", device_type="cuda", link="1Gbit", flops="50G", tokens_per_sample=16
    )


def test_a_plan_with_times_recommends_the_fastest_that_fits(planned: Plan) -> None:
    assert planned.chosen is not None
    considered = [each for each in planned.estimates if each.seconds is not None]
    assert planned.chosen.seconds == min(each.seconds or 0 for each in considered)
    assert "the shortest of those that fit" in planned.advice.text
    assert "step" in str(planned)
    seconds = {each["name"]: each["seconds"] for each in planned.as_dict()["strategies"]}
    assert seconds["paral_ddp"] == planned.of("paral_ddp").seconds


def test_a_plan_without_a_machine_has_no_times() -> None:
    made = plan(gpt(64, 1), bytes_of_text(2), 2, "16GiB")

    assert {each.seconds for each in made.estimates} == {None}
    assert "predicted" not in str(made)
    with pytest.raises(ConfigurationError, match="no times"):
        made.scaling()


def test_scaling_has_every_strategy_at_every_number_of_ranks(planned: Plan) -> None:
    rows = planned.scaling()

    assert [(row.layout.name, row.world_size) for row in rows] == [
        (each.layout.name, size) for each in planned.estimates for size in WORLD_SIZES
    ]
    (four,) = [row for row in rows if (row.layout.name, row.world_size) == ("paral_fsdp", 4)]
    assert four.seconds == planned.of("paral_fsdp").seconds
    assert four.samples_per_second == pytest.approx(4 * 4 / four.seconds)
    assert four.tokens_per_second == pytest.approx(4 * 4 * 16 / four.seconds)
    assert (four.peak_bytes, four.fits) == (planned.of("paral_fsdp").memory.peak_bytes, True)
    with pytest.raises(ConfigurationError, match="world_size=0"):
        planned.scaling([0])


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        *(
            (parse_bandwidth, text, bytes_)
            for text, bytes_ in (("400Gbit", 50e9), ("1 Gbit/s", 125e6), ("1GiB/s", 2**30))
        ),
        *((parse_flops, text, flops) for text, flops in (("790 TFLOPS", 790e12), ("1.5P", 1.5e15), ("2e12", 2e12))),
        *((parse_seconds, text, seconds) for text, seconds in (("20us", 20e-6), ("1.5ms", 1.5e-3), ("0", 0.0))),
    ],
)
def test_quantities_are_parsed(parse: Any, text: str, expected: float) -> None:
    assert parse(text, "--option") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_bandwidth("400G", "--link"), r"^--link .* is not a bandwidth\. Give .*400Gbit"),
        (lambda: parse_bandwidth("-1Gbit", "--link"), "is not a bandwidth"),
        (lambda: parse_flops("790X", "--flops"), "--flops '790X'"),
        (lambda: parse_seconds("20 minutes", "--latency"), "--latency '20 minutes'"),
        (lambda: MachineOptions(link="1Gbit"), "flops is not known"),
        (lambda: MachineOptions(flops="1T"), "link is not known"),
        (lambda: MachineOptions(latency="5ms"), "link is not known"),
        (lambda: Machine(flops=1, link=1, ranks_per_node=8), "belong together"),
        (lambda: plan(gpt(64, 1), bytes_of_text(2), machine=SLOW, link="1Gbit"), "Leave out link"),
        (lambda: Machine(flops=0, link=1), "flops=0"),
        (lambda: Machine(flops=1, link=1, latency=-1), "latency=-1"),
        (lambda: parse_world_sizes("1,,2"), "--scale"),
        (lambda: parse_world_sizes("two"), "--scale"),
    ],
)
def test_mistakes_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def comm_rows(num_ranks: int, latency: float, link: float) -> list[dict[str, Any]]:
    steps = 2 * (num_ranks - 1)
    seconds = {size: steps * (latency + size / num_ranks / link) for size in (2**16, 2**20, 2**24)}
    return [{"algorithm": "native", "wire": "fp32", "size_bytes": size, "seconds": seconds[size]} for size in seconds]


def test_measured_files_make_a_machine(tmp_path: Path, followed: FollowedSteps) -> None:
    states = followed.states
    records: dict[str, Any] = {
        "comm": {"num_ranks": 2, "rows": comm_rows(2, 1e-4, 1e9)},
        "step": {
            "num_ranks": 1,
            "module": "GPT",
            "num_params": states.num_params,
            "batch_size": 8,
            "rows": [{"strategy": "raw_ddp", "seconds": 0.5}],
        },
        "adam": {"rows": [{"num_params": 10**6, "seconds": 0.016}, {"num_params": 10**6, "seconds": 0.02}]},
    }
    paths = []
    for name, record in records.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"benchmark": name, **record}))
        paths.append(str(path))

    machine = MachineOptions(measured=tuple(paths), latency="5us").machine(followed, "GPT")

    assert machine is not None
    assert machine.link == pytest.approx(1e9)
    assert machine.latency == pytest.approx(5e-6)
    assert machine.flops == pytest.approx(2 * followed.plain.flops / 0.5)  # twice the batch of the plan
    assert machine.optimizer_bandwidth == pytest.approx(1e9)
    with pytest.raises(ConfigurationError, match="measured GPT with"):
        MachineOptions(measured=tuple(paths)).machine(followed, "Other")
    with pytest.raises(ConfigurationError, match="cannot be read as JSON"):
        MachineOptions(measured=(str(tmp_path / "missing.json"),)).machine(followed, "GPT")
