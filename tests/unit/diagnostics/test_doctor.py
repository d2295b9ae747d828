"""What the doctor finds, which strategies are ready by it, and the table and the JSON that say so."""

import json
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console

from lightning_paral import STRATEGIES
from lightning_paral.diagnostics import doctor
from lightning_paral.diagnostics.doctor import Fact, Report, nvme_fact, operator_facts, version_facts
from lightning_paral.tested_versions import TESTED_VERSIONS
from tests.command import run_paral

NAMES = {entry.name for entry in STRATEGIES}
ZERO = {name for name in NAMES if name.startswith("paral_zero")}
NVME = {"paral_zero3_nvme"}
OFFLOAD = {name for name in ZERO if name.endswith("offload")} | NVME


def by_name(facts: list[Fact]) -> dict[str, Fact]:
    return {fact.name: fact for fact in facts}


def test_versions_are_those_of_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED_VERSIONS, "lightning", ">=1.0,<1.1")
    monkeypatch.setitem(TESTED_VERSIONS, "no-such-package", ">=1")

    facts = by_name(version_facts({}))

    assert all(metadata.version(name) in facts[name].found for name in ("torch", "lightning", "deepspeed"))
    assert facts["torch"].state == "ok"
    assert (facts["lightning"].state, facts["lightning"].advice) == ("warning", "pip install 'lightning>=1.0,<1.1'")
    assert (facts["no-such-package"].state, facts["no-such-package"].found) == ("broken", "not installed")


def test_what_compiles_operators_is_lacking_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for variable in ("PATH", "TORCH_EXTENSIONS_DIR"):  # no commands, and no operators compiled earlier
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setattr(doctor.sys, "executable", str(tmp_path / "python"))
    monkeypatch.delenv("CXX", raising=False)

    lacking = {fact.name: (fact.advice, fact.stops) for fact in operator_facts() if fact.state == "warning"}

    assert lacking.pop("compiler") == ("apt-get install g++", "offload")
    assert lacking.pop("libaio") == ("apt-get install libaio-dev", "nvme")
    assert lacking.pop("ninja") == ("pip install ninja", "offload")
    assert set(lacking) <= {"Python headers"}


def test_nvme_folder_is_checked_and_left_empty(tmp_path: Path) -> None:
    sound, missing = nvme_fact(str(tmp_path)), nvme_fact(str(tmp_path / "missing"))

    assert sound.state == "ok"
    assert sound.numbers["free"] > 0
    assert not list(tmp_path.iterdir())
    assert missing.state == "broken"
    assert "no such folder" in missing.advice
    assert nvme_fact(None).state == "note"


@pytest.mark.parametrize(
    ("stops", "lacking"),
    [
        ("", set()),
        ("all", NAMES),
        ("ranks", NAMES - {"paral_dp"}),
        ("zero", ZERO),
        ("offload", OFFLOAD),
        ("nvme", NVME),
    ],
)
def test_table_and_json_say_which_strategies_lack_what(stops: doctor.Stops, lacking: set[str]) -> None:
    sound = Fact(name="torch", found="2.13.0 [rich's markup]")
    lack = Fact(name="it", found="x " * 90, state="broken", advice="apt-get install it", stops=stops)
    report = Report(facts=(sound, lack), environment={})
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(report)
    printed = capture.get().splitlines()
    found = json.loads(json.dumps(report.as_dict()))

    assert max(map(len, printed)) <= 80
    assert set(" ".join(printed).replace(",", " ").split()) >= NAMES
    assert "[rich's markup]" in capture.get()
    assert "apt-get install it" in capture.get()
    assert printed[-1] == "Broken: it."
    assert found["broken"] == ["it"]
    assert {entry["name"] for entry in found["strategies"] if entry["lacks"] == ["it"]} == lacking


@pytest.mark.parametrize(("ranks", "said"), [("0", "is not a number of ranks"), ("100000", "of host memory for each")])
def test_ranks_have_to_be_a_number_that_fits(ranks: str, said: str) -> None:
    assert said in run_paral("doctor", "--ranks", ranks)
