"""Which strategies are ready on this machine, and what the others lack."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_paral.diagnostics.doctor.facts import Fact
from lightning_paral.registry import STRATEGIES, RegisteredStrategy
from lightning_paral.strategies.dp import ParalDPStrategy
from lightning_paral.strategies.zero import ParalZeROStrategy

_WORK_WITH_A_NOTE = ("torch", "lightning", "deepspeed", "gloo", "NCCL")
"""Facts that keep a strategy from running only if they are broken, and not if a version is untested, for example."""

_INSTALLERS = ("apt-get install", "pip install")


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """Whether a strategy can run on this machine."""

    name: str
    lacks: tuple[str, ...] = ()
    """The names of the facts that keep it from running. Empty if it is ready."""
    advice: tuple[str, ...] = ()
    """The commands or sentences that say what to do."""

    @property
    def is_ready(self) -> bool:
        """Whether it lacks nothing."""
        return not self.lacks


def strategies_readiness(
    facts: Iterable[Fact], strategies: Sequence[RegisteredStrategy] = STRATEGIES
) -> list[Readiness]:
    """Return for each strategy whether it can run.

    Args:
        facts: what was found.
        strategies: the strategies to look at.
    """
    by_name = {fact.name: fact for fact in facts}
    return [_readiness(entry, by_name) for entry in strategies]


def _readiness(entry: RegisteredStrategy, facts: Mapping[str, Fact]) -> Readiness:
    unknown = {name: Fact(name=name, found="could not be examined", state="broken") for name in needs(entry, facts)}
    lacking = [fact for name in unknown if _keeps_from_running(fact := facts.get(name, unknown[name]))]
    return Readiness(
        name=entry.name,
        lacks=tuple(fact.name for fact in lacking),
        advice=join_commands(fact.advice for fact in lacking if fact.advice),
    )


def _keeps_from_running(fact: Fact) -> bool:
    if fact.name in _WORK_WITH_A_NOTE:
        return fact.state == "broken"
    if fact.name == "NVMe":
        return fact.state in ("note", "broken")  # a warning says that it is slow
    return not fact.is_ok


def needs(entry: RegisteredStrategy, facts: Mapping[str, Fact]) -> list[str]:
    """Return the names of the facts that a strategy depends on.

    Args:
        entry: a row of the registry.
        facts: what was found, by name. An operator that is compiled needs no headers and no ninja.
    """
    names = ["torch", "lightning"]
    if not issubclass(entry.strategy, ParalDPStrategy):
        names += ["interfaces", "gloo", "NCCL"]
    if not issubclass(entry.strategy, ParalZeROStrategy):
        return names
    names.append("deepspeed")
    offloads = {entry.arguments.get(option) for option in ("offload_optimizer", "offload_parameters")} - {None}
    if not offloads:
        return names
    names.append("compiler")
    operators = ["operator cpu_adam"] + ["operator async_io"] * ("nvme" in offloads)
    if not all(name in facts and facts[name].is_ok for name in operators):
        names += ["Python headers", "ninja"]
    if "nvme" in offloads:
        names += ["libaio", "NVMe"]
    return names


def join_commands(advice: Iterable[str]) -> tuple[str, ...]:
    """Return advice with one command for each installer: `apt-get install g++ libaio-dev`.

    Args:
        advice: commands and sentences. Equal ones are returned once.
    """
    packages: dict[str, list[str]] = {}
    others: list[str] = []
    for each in dict.fromkeys(advice):
        installer = next((name for name in _INSTALLERS if each.startswith(f"{name} ")), None)
        if installer is None:
            others.append(each)
        else:
            packages.setdefault(installer, []).append(each.removeprefix(f"{installer} "))
    return (*(f"{installer} {' '.join(names)}" for installer, names in packages.items()), *others)
