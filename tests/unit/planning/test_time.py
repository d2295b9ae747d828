"""The predicted time of a step: closed forms, limits, and errors."""

import io
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lightning_paral import ConfigurationError, Plan, plan
from lightning_paral.planning.following import FollowedSteps, follow_steps
from lightning_paral.planning.layout import LAYOUTS, Layout, layouts_of
from lightning_paral.planning.scaling_report import scaling_as_table
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.time.collectives import Collectives
from lightning_paral.planning.time.machine import LOCAL_LATENCY, Machine
from lightning_paral.planning.time.measured import fit_link
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
def test_one_rank_takes_as_long_as_its_operations(followed: FollowedSteps, layout: Layout, on_cpu: bool) -> None:
    assert seconds_of(followed, layout, 1, SLOW, on_cpu=on_cpu) == pytest.approx(followed.plain.flops / FLOPS)


@pytest.mark.parametrize(("layout", "on_cpu"), BOTH)
def test_an_endless_link_leaves_the_operations(followed: FollowedSteps, layout: Layout, on_cpu: bool) -> None:
    for num_ranks in (2, 7, 4096):
        found = seconds_of(followed, layout, num_ranks, ENDLESS, on_cpu=on_cpu)
        assert found == pytest.approx(followed.plain.flops / FLOPS)


@pytest.mark.parametrize(("layout", "on_cpu"), BOTH)
def test_more_ranks_and_slower_links_never_make_a_step_shorter(
    followed: FollowedSteps, layout: Layout, on_cpu: bool
) -> None:
    times = [seconds_of(followed, layout, num_ranks, SLOW, on_cpu=on_cpu) for num_ranks in WORLD_SIZES]
    more_than_two = times[2:]  # two ranks on gloo gather slowly
    assert more_than_two == sorted(more_than_two)
    assert times[0] < min(times[1:])
    assert times[2] < times[-1]
    faster = Machine(flops=FLOPS, link=2 * LINK, latency=LATENCY)
    assert seconds_of(followed, layout, 4, faster, on_cpu=on_cpu) < times[2]


def test_ddp_hides_all_but_the_last_bucket_behind_long_computation(followed: FollowedSteps) -> None:
    sizes = [state.gradient_bytes for state in followed.states.parameters]
    ready = [moment.number for moment in followed.plain.moments if moment.kind.value == "ready"]
    first = next(n for n in range(1, len(ready)) if sum(sizes[i] for i in ready[:n]) >= 2**20)
    last_bucket = sum(sizes[number] for number in ready[first:])
    slow_compute = Machine(flops=1e6, link=LINK, latency=LATENCY)

    found = seconds_of(followed, named("paral_ddp"), 4, slow_compute)

    ring = 2 * 3 * (LATENCY + last_bucket / 4 / LINK)
    assert found == pytest.approx(followed.plain.flops / 1e6 + ring)


def test_ddp_takes_as_long_as_its_all_reduces_if_computation_takes_no_time(followed: FollowedSteps) -> None:
    found = seconds_of(followed, named("paral_ddp"), 4, Machine(flops=math.inf, link=LINK, latency=LATENCY))

    assert found == pytest.approx(2 * 2 * 3 * LATENCY + 2 * 3 / 4 * followed.states.gradient_bytes / LINK)


def test_fsdp_on_cpu_overlaps_nothing(followed: FollowedSteps) -> None:
    states, units = followed.states, followed.plain.units
    num_units = len(units)
    root = sum(states.parameters[number].num_bytes for number in units[-1].parameters)
    gathered = states.parameter_bytes * 2 - root  # the root stays unsharded between forward and backward
    sent = (gathered + states.gradient_bytes) * 3 / 4

    found = seconds_of(followed, named("paral_fsdp"), 4, SLOW)

    num_steps = 3 * (2 * num_units - 1) + num_units  # a reduce-scatter sends all its messages at once
    assert found == pytest.approx(followed.plain.flops / FLOPS + sent / LINK + num_steps * LATENCY)


def test_fsdp_on_cuda_hides_communication_behind_computation(followed: FollowedSteps) -> None:
    slow_compute = Machine(flops=1e9, link=LINK, latency=0.0)
    compute = followed.plain.flops / 1e9

    on_cpu, on_cuda = (
        seconds_of(followed, named("paral_fsdp"), 2, slow_compute, on_cpu=on_cpu) for on_cpu in (True, False)
    )

    assert compute < on_cuda < compute + 0.5 * (on_cpu - compute)


def test_accumulation_repeats_computation_but_not_ddps_communication() -> None:
    once, fourfold = (
        follow_steps(lambda: gpt(128, 3), bytes_of_text(4), StepSettings(accumulate=number)) for number in (1, 4)
    )
    compute = once.plain.flops / FLOPS
    ddp, fsdp = (
        [
            seconds_of(steps, named(name), 2, SLOW, accumulate=number) - number * compute
            for steps, number in ((once, 1), (fourfold, 4))
        ]
        for name in ("paral_ddp", "paral_fsdp")
    )

    assert ddp[1] == pytest.approx(ddp[0])
    assert fsdp[0] * 3 < fsdp[1] < fsdp[0] * 4.001


def test_the_optimizer_updates_its_shard(followed: FollowedSteps) -> None:
    states = followed.states
    touched = states.parameter_bytes + states.gradient_bytes + states.optimizer_bytes
    machine = Machine(flops=FLOPS, link=math.inf, latency=0.0, optimizer_bandwidth=1e9)
    compute = followed.plain.flops / FLOPS

    assert seconds_of(followed, named("paral_ddp"), 4, machine) - compute == pytest.approx(touched / 1e9)
    for name in ("paral_fsdp", "paral_zero1"):
        assert seconds_of(followed, named(name), 4, machine) - compute == pytest.approx(touched / 4 / 1e9)


def test_trees_shorten_the_latency_on_nccl_only() -> None:
    num_bytes = 4096.0
    gloo, nccl = (Collectives(SLOW, 1024, on_cpu=on_cpu) for on_cpu in (True, False))

    assert gloo.all_reduce(num_bytes) == pytest.approx(2 * 1023 * (LATENCY + num_bytes / 1024 / LINK))
    assert nccl.all_reduce(num_bytes) == pytest.approx(2 * (10 * LATENCY + num_bytes / LINK))
    assert nccl.all_reduce(num_bytes, ring=True) == gloo.all_reduce(num_bytes)
    assert nccl.all_gather(num_bytes) == pytest.approx(10 * LATENCY + 1023 / 1024 * num_bytes / LINK)


def test_two_ranks_on_gloo_gather_one_after_the_other() -> None:
    gloo, nccl = (Collectives(SLOW, 2, on_cpu=on_cpu) for on_cpu in (True, False))

    assert nccl.all_gather(8e6) == pytest.approx(LATENCY + 4e6 / LINK)
    assert gloo.all_gather(8e6) == pytest.approx(2 * nccl.all_gather(8e6))
    assert gloo.direct_reduce_scatter(8e6) == pytest.approx(LATENCY + 4e6 / LINK)


def test_zero_on_gloo_reduces_to_one_owner_after_the_other(followed: FollowedSteps) -> None:
    """Four ranks own a quarter of the only bucket each: see `ZeROStep._reduce_to_owners`."""
    bandwidth_alone = Machine(flops=math.inf, link=LINK, latency=0.0)
    quarter = followed.states.gradient_bytes / 4

    found = seconds_of(followed, named("paral_zero2"), 4, bandwidth_alone)

    gathered = followed.states.gradient_bytes * 3 / 4
    assert found == pytest.approx(((3 + 3 + 2 + 1) * quarter + gathered) / LINK)


def test_ranks_of_one_node_use_the_local_link() -> None:
    machine = Machine(flops=FLOPS, link=LINK, latency=LATENCY, local_link=100 * LINK, ranks_per_node=8)
    one_node, two_nodes = (Collectives(machine, num_ranks, on_cpu=False) for num_ranks in (8, 16))

    assert one_node.all_gather(8e6) == pytest.approx(7 * (LOCAL_LATENCY + 1e6 / (100 * LINK)))
    assert two_nodes.all_gather(16e6) == pytest.approx(LATENCY + 14 * LOCAL_LATENCY + 15e6 / LINK)


@pytest.mark.parametrize("layout", TRAINED)
def test_4096_ranks_are_predicted_within_a_second(followed: FollowedSteps, layout: Layout) -> None:
    began = time.process_time()
    seconds_of(followed, layout, 4096, SLOW)
    assert time.process_time() - began < 1


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


def test_scaling_says_from_which_number_of_ranks_on_a_strategy_fits(planned: Plan) -> None:
    small = replace(planned, device_memory=round(planned.of("paral_zero3").memory.peak_bytes / 0.9) + 1)

    found = {row.world_size: row.fits for row in small.scaling([1, 4, 64]) if row.layout.name == "paral_zero3"}
    assert found == {1: False, 4: True, 64: True}
    shown = io.StringIO()
    Console(file=shown, width=120).print(scaling_as_table(small.scaling([1, 4])))
    line = next(line for line in shown.getvalue().splitlines() if line.startswith(" paral_zero3 "))
    assert line.count("(") == line.count(")") == 1
    assert "In parentheses" in shown.getvalue()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("400Gbit", 50e9), ("1 Gbit/s", 125e6), ("100Gbps", 12.5e9), ("50GB/s", 50e9), ("1GiB/s", 2**30), (125e6, 125e6)],
)
def test_bandwidths_are_parsed(text: str | float, expected: float) -> None:
    assert parse_bandwidth(text, "--link") == expected


@pytest.mark.parametrize("text", ["400Gbitt", "400G", "fast", "-1Gbit", "0Gbit", ""])
def test_other_text_is_no_bandwidth(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--link .* is not a bandwidth\. Give .*400Gbit"):
        parse_bandwidth(text, "--link")


def test_flops_and_durations_are_parsed() -> None:
    assert [parse_flops(text, "") for text in ("790T", "790 TFLOPS", "1.5P", "2e12")] == [790e12, 790e12, 1.5e15, 2e12]
    assert [parse_seconds(text, "") for text in ("20us", "1.5ms", "0", 0.1)] == pytest.approx([20e-6, 1.5e-3, 0, 0.1])
    with pytest.raises(ConfigurationError, match="--flops '790X'"):
        parse_flops("790X", "--flops")
    with pytest.raises(ConfigurationError, match="--latency '20 minutes'"):
        parse_seconds("20 minutes", "--latency")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"link": "1Gbit"}, "flops is not known"),
        ({"flops": "1T"}, "link is not known"),
        ({"link": "1Gbit", "flops": "1T", "ranks_per_node": 8}, "belong together"),
        ({"latency": "5ms"}, "link is not known"),
    ],
)
def test_incomplete_machines_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plan(gpt(64, 1), bytes_of_text(2), machine=MachineOptions(**given))


def test_machines_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="flops=0"):
        Machine(flops=0, link=1)
    with pytest.raises(ConfigurationError, match="latency=-1"):
        Machine(flops=1, link=1, latency=-1)
    with pytest.raises(ConfigurationError, match="Leave out link"):
        plan(gpt(64, 1), bytes_of_text(2), machine=SLOW, link="1Gbit")
    for text in ("1,0", "two", "1,,2"):
        with pytest.raises(ConfigurationError, match="--scale"):
            parse_world_sizes(text)


def comm_rows(num_ranks: int, latency: float, link: float) -> list[dict[str, Any]]:
    steps = 2 * (num_ranks - 1)
    return [
        {
            "algorithm": "native",
            "wire": "fp32",
            "size_bytes": size,
            "seconds": steps * (latency + size / num_ranks / link),
        }
        for size in (2**16, 2**20, 2**24)
    ]


def test_the_link_is_found_in_what_bench_comm_measured() -> None:
    latency, link = fit_link(comm_rows(4, 2e-4, 1e9), 4, "comm.json")

    assert (latency, link) == pytest.approx((2e-4, 1e9))


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
    (tmp_path / "step.json").write_text('{"benchmark": "checkpoint"}')
    with pytest.raises(ConfigurationError, match="does not have the figures"):
        MachineOptions(measured=tuple(paths)).machine(followed, "GPT")
    for broken in ("missing.json", "broken.json"):
        (tmp_path / "broken.json").write_text("{")
        with pytest.raises(ConfigurationError, match="cannot be read as JSON"):
            MachineOptions(measured=(str(tmp_path / broken),)).machine(followed, "GPT")


def test_padding_of_small_shards_is_predicted(followed: FollowedSteps) -> None:
    """FSDP2 pads the first dimension, so at many ranks it gathers more than the parameters."""
    bandwidth_alone = Machine(flops=math.inf, link=LINK, latency=0.0)
    few, many = (seconds_of(followed, named("paral_fsdp"), num_ranks, bandwidth_alone) for num_ranks in (64, 4096))

    assert many > 2 * few


def test_replicas_share_less_over_links_between_nodes(followed: FollowedSteps) -> None:
    nodes = Machine(flops=FLOPS, link=LINK, latency=LATENCY, local_link=100 * LINK, ranks_per_node=4)
    plain, hybrid = named("paral_fsdp"), replace(named("paral_fsdp"), replicas=2)

    assert seconds_of(followed, hybrid, 8, nodes) < 0.6 * seconds_of(followed, plain, 8, nodes)
    assert (
        step_seconds(hybrid, StepEvents(followed.plain), followed.states, 3, StepSettings(), nodes, on_cpu=True) is None
    )


def test_options_of_a_strategy_change_its_time(followed: FollowedSteps) -> None:
    fsdp, ddp = named("paral_fsdp"), named("paral_ddp_ring")

    gathered_once = seconds_of(followed, fsdp, 4, SLOW) - seconds_of(followed, replace(fsdp, reshards=False), 4, SLOW)
    blocks = followed.plain.units[:-1]
    gathered = sum(followed.states.parameters[number].num_bytes for unit in blocks for number in unit.parameters)
    assert gathered_once == pytest.approx(len(blocks) * 3 * LATENCY + gathered * 3 / 4 / LINK, rel=0.02)
    slow = Machine(flops=1e15, link=LINK, latency=0.0)
    halved = seconds_of(followed, replace(ddp, wire_itemsize=2), 4, slow)
    assert halved == pytest.approx(seconds_of(followed, ddp, 4, slow) / 2, rel=0.01)
