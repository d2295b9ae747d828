"""What the doctor finds, which strategies are ready by it, and the rows and the JSON that say so."""

import json
from importlib import metadata
from pathlib import Path

import pytest

from lightning_paral import STRATEGIES
from lightning_paral.diagnostics import doctor
from lightning_paral.diagnostics.doctor import Fact, as_json, conclusion, nvme_fact, version_fact
from lightning_paral.tested_versions import TESTED_VERSIONS
from tests.command import run_paral

NAMES = {entry.name for entry in STRATEGIES}
ZERO = {name for name in NAMES if name.startswith("paral_zero")}
NVME = {"paral_zero3_nvme"}


def test_versions_are_those_of_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED_VERSIONS, "lightning", ">=1.0,<1.1")
    monkeypatch.setitem(TESTED_VERSIONS, "no-such-package", ">=1")

    facts = {name: version_fact(name) for name in TESTED_VERSIONS}

    assert all(metadata.version(name) in facts[name].found for name in ("torch", "lightning", "deepspeed"))
    assert facts["torch"].state == "ok"
    assert (facts["lightning"].state, facts["lightning"].advice) == ("warning", "pip install 'lightning>=1.0,<1.1'")
    assert (facts["no-such-package"].state, facts["no-such-package"].found) == ("broken", "not installed")


def test_lacking_compiler_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    fact = nvme_fact(str(tmp_path))

    assert (fact.state, fact.found) == ("broken", f"{tmp_path} cannot be used")
    assert "apt-get install g++" in fact.advice


def test_part_that_raises_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "nvme_fact", lambda path: [][0])
    monkeypatch.setattr(doctor, "all_reduce_fact", lambda num_ranks: Fact(name="all-reduce", found=""))

    facts = {fact.name: fact for fact in doctor.examine(2, None)}

    assert facts["NVMe"].found == "could not be examined: IndexError: list index out of range"


def test_nvme_folder_is_checked_and_left_empty(tmp_path: Path) -> None:
    sound, missing = nvme_fact(str(tmp_path)), nvme_fact(str(tmp_path / "missing"))

    assert sound.state == "ok"
    assert sound.found.endswith(" free")
    assert not list(tmp_path.iterdir())
    assert missing.state == "broken"
    assert "no such folder" in missing.advice
    assert nvme_fact(None).state == "note"


@pytest.mark.parametrize(
    ("stops", "lacking"),
    [
        ("", set()),
        (doctor.ALL, NAMES),
        (doctor.RANKS, NAMES - {"paral_dp"}),
        (doctor.ZERO, ZERO),
        (doctor.NVME, NVME),
    ],
)
def test_rows_and_json_say_which_strategies_lack_what(stops: str, lacking: set[str]) -> None:
    sound = Fact(name="torch", found="2.13.0")
    advice = f"{'x' * 47} apt-get install it"  # a line could end with `apt-`
    lack = Fact(name="it", found="x " * 90, state="broken", advice=advice, stops=stops)
    text = f"{sound}\n{lack}\n{conclusion([sound, lack])}"
    printed = text.splitlines()
    found = json.loads(json.dumps(as_json([sound, lack])))

    assert max(map(len, printed)) <= 80
    assert set(" ".join(printed).replace(",", " ").split()) >= NAMES
    assert "apt-get install it" in text
    assert printed[-1] == "Broken: it."
    assert found["broken"] == ["it"]
    assert {entry["name"] for entry in found["strategies"] if entry["lacks"] == ["it"]} == lacking


def test_there_is_at_least_one_rank() -> None:
    assert "--ranks 0 was given. Give at least 1." in run_paral("doctor", "--ranks", "0")
