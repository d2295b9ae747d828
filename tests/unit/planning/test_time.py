"""The predicted time of a step: closed forms, limits, and errors."""

from typing import Any

import pytest

from lightning_paral import ConfigurationError, plan
from lightning_paral.planning.time.machine import Machine
from lightning_paral.planning.time.options import MachineOptions
from lightning_paral.planning.time.world_sizes import parse_world_sizes
from lightning_paral.quantities import parse_bandwidth, parse_flops, parse_seconds
from tests.unit.planning.models import bytes_of_text, gpt


def test_a_plan_with_times_recommends_the_fastest_that_fits() -> None:
    planned = plan(gpt(128, 3), bytes_of_text(4), 4, "16GiB", device_type="cuda", link="1Gbit", flops="50G")
    assert planned.chosen is not None
    considered = [each for each in planned.estimates if each.seconds is not None]
    assert planned.chosen.seconds == min(each.seconds or 0 for each in considered)
    assert "the shortest of those that fit" in planned.advice.text


def test_a_plan_without_a_machine_has_no_times() -> None:
    made = plan(gpt(64, 1), bytes_of_text(2), 2, "16GiB")

    assert {each.seconds for each in made.estimates} == {None}
    assert "predicted" not in str(made)
    with pytest.raises(ConfigurationError, match="no times"):
        made.scaling()


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        *(
            (parse_bandwidth, text, found)
            for text, found in (("400Gbit", 50e9), ("1 Gbit/s", 125e6), ("1GiB/s", 2**30))
        ),
        *((parse_flops, text, found) for text, found in (("790 TFLOPS", 790e12), ("1.5P", 1.5e15), ("2e12", 2e12))),
        *((parse_seconds, text, found) for text, found in (("20us", 20e-6), ("1.5ms", 1.5e-3), ("0", 0.0))),
    ],
)
def test_quantities_are_parsed(parse: Any, text: str, expected: float) -> None:
    assert parse(text, "--option") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_bandwidth("400G", "--link"), r"^--link .* is not a bandwidth\. Give .*400Gbit"),
        (lambda: parse_flops("790X", "--flops"), "--flops '790X'"),
        (lambda: parse_seconds("20 minutes", "--latency"), "--latency '20 minutes'"),
        (lambda: MachineOptions(link="1Gbit"), "flops is not known"),
        (lambda: Machine(flops=1, link=1, ranks_per_node=8), "belong together"),
        (lambda: plan(gpt(64, 1), bytes_of_text(2), machine=Machine(flops=1, link=1), link="1Gbit"), "Leave out link"),
        (lambda: parse_world_sizes("two"), "--scale"),
    ],
)
def test_mistakes_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
