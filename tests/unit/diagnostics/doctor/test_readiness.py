"""Which strategies are ready, and what the others lack."""

from collections.abc import Mapping

import pytest

from lightning_paral import STRATEGIES
from lightning_paral.diagnostics.doctor.facts import Fact, State
from lightning_paral.diagnostics.doctor.readiness import strategies_readiness

NAMES = (
    *("torch", "lightning", "deepspeed", "interfaces", "gloo", "NCCL", "compiler", "Python headers", "libaio"),
    *("ninja", "operator cpu_adam", "operator async_io", "NVMe"),
)
ADVICE = {
    "compiler": "apt-get install g++",
    "libaio": "apt-get install libaio-dev",
    "Python headers": "apt-get install python3-dev",
    "ninja": "pip install ninja",
}
OFFLOAD = {"paral_zero1_offload", "paral_zero2_offload", "paral_zero3_offload", "paral_zero3_nvme"}


def lacks(states: Mapping[str, State]) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    facts = [
        Fact(name=name, found="", state=states.get(name, "ok"), advice=ADVICE.get(name, "") if name in states else "")
        for name in NAMES
    ]
    return {entry.name: (entry.lacks, entry.advice) for entry in strategies_readiness(facts) if not entry.is_ready}


def test_all_strategies_are_ready_if_nothing_is_missing() -> None:
    assert lacks({}) == {}
    assert len(strategies_readiness([])) == len(STRATEGIES)


def test_offload_lacks_what_compiles_operators_and_one_command_installs_it() -> None:
    missing: dict[str, State] = {"compiler": "warning", "libaio": "warning", "operator cpu_adam": "note"}

    found = lacks(missing)

    assert set(found) == OFFLOAD
    assert found["paral_zero1_offload"] == (("compiler",), ("apt-get install g++",))
    assert found["paral_zero3_nvme"] == (("compiler", "libaio"), ("apt-get install g++ libaio-dev",))


def test_headers_and_ninja_are_needed_only_until_the_operator_is_compiled() -> None:
    missing: dict[str, State] = {"Python headers": "warning", "ninja": "warning"}
    assert lacks(missing) == {}

    found = lacks(missing | {"operator async_io": "note"})

    commands = ("apt-get install python3-dev", "pip install ninja")
    assert found == {"paral_zero3_nvme": (("Python headers", "ninja"), commands)}


@pytest.mark.parametrize("name", ["gloo", "NCCL"])
def test_only_dp_is_ready_without_communication(name: str) -> None:
    assert set(lacks({name: "broken"})) == {entry.name for entry in STRATEGIES} - {"paral_dp"}
    assert lacks({name: "note"}) == {}


def test_zero_needs_deepspeed_and_nvme_needs_its_folder() -> None:
    assert set(lacks({"deepspeed": "broken"})) == {e.name for e in STRATEGIES if e.name.startswith("paral_zero")}
    assert set(lacks({"NVMe": "note"})) == {"paral_zero3_nvme"}
    assert lacks({"NVMe": "warning", "deepspeed": "warning"}) == {}
