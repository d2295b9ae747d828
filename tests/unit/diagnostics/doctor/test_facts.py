"""What the doctor finds on this machine."""

from importlib import metadata
from pathlib import Path

import pytest

from lightning_paral.diagnostics.doctor.facts import Fact
from lightning_paral.diagnostics.doctor.nvme import nvme_fact
from lightning_paral.diagnostics.doctor.operators import operator_facts
from lightning_paral.diagnostics.doctor.versions import version_facts
from lightning_paral.model import host_memory_check
from lightning_paral.tested_versions import TESTED_VERSIONS


def by_name(facts: list[Fact]) -> dict[str, Fact]:
    return {fact.name: fact for fact in facts}


def test_versions_are_those_of_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED_VERSIONS, "lightning", ">=1.0,<1.1")

    facts = by_name(version_facts())

    for name in TESTED_VERSIONS:
        assert metadata.version(name) in facts[name].found
    assert facts["lightning"].state == "warning"
    assert facts["lightning"].advice == "pip install 'lightning>=1.0,<1.1'"
    assert facts["torch"].state == "ok"


def test_a_package_that_is_missing_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED_VERSIONS, "no-such-package", ">=1")

    fact = by_name(version_facts())["no-such-package"]

    assert (fact.state, fact.advice) == ("broken", "pip install 'no-such-package>=1'")


def test_free_memory_of_a_container_counts_what_the_kernel_can_reclaim(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 300\nfile 600\ninactive_anon 20\ninactive_file 550\nactive_file 50\n")
    assert host_memory_check._free_in_container(tmp_path) == 650

    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory_check._free_in_container(tmp_path) is None


def test_without_a_compiler_the_commands_that_install_one_are_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)

    facts = by_name(operator_facts())

    assert (facts["compiler"].state, facts["compiler"].advice) == ("warning", "apt-get install g++")
    assert (facts["libaio"].state, facts["libaio"].advice) == ("warning", "apt-get install libaio-dev")


def test_operators_are_looked_for_in_the_folder_of_these_versions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    missing = by_name(operator_facts())["operator cpu_adam"]
    assert missing.state == "note"

    path = Path(missing.data["path"])
    path.parent.mkdir(parents=True)
    path.touch()

    assert by_name(operator_facts())["operator cpu_adam"].is_ok


def test_nvme_folder_is_measured_and_left_empty(tmp_path: Path) -> None:
    fact = nvme_fact({"PARAL_NVME_PATH": str(tmp_path)})

    assert fact.is_ok, fact
    assert fact.data["write"] > 0
    assert fact.data["read"] > 0
    assert not list(tmp_path.iterdir())


def test_nvme_folder_that_does_not_exist_is_broken(tmp_path: Path) -> None:
    fact = nvme_fact({"PARAL_NVME_PATH": str(tmp_path / "missing")})

    assert fact.state == "broken"
    assert "no such folder" in fact.advice
    assert nvme_fact({}).state == "note"
