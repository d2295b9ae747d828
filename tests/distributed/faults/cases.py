"""Which runs are broken: strategy, launcher, fault, stage and rank."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields

PARAL = ("paral_ddp", "paral_fsdp", "paral_zero1", "paral_zero2", "paral_zero3")
STRATEGIES = (*PARAL, "ddp")
LAUNCHERS = ("python", "torchrun")

FAULTS = {
    "exception": "the rank raises an error",
    "exit_0": "the rank calls sys.exit(0)",
    "exit_3": "the rank calls sys.exit(3)",
    "sigkill": "the rank is killed, as by the kernel when memory is full",
    "sigsegv": "C code of the rank follows a null pointer",
    "os_exit_0": "the rank calls os._exit(0)",
    "os_exit_1": "the rank calls os._exit(1)",
    "ctrl_c": "the terminal sends SIGINT to its foreground processes",
    "others_sleep": "the rank raises an error while the others are in time.sleep",
    "others_in_c": "the rank raises an error while the others are in C code that does not return",
    "launcher_killed": "the process that started the ranks is killed: rank 0, or torchrun's agent",
}
EXCEPTIONS = ("exception", "others_sleep", "others_in_c")
"""Faults with a traceback."""

STAGES = {
    "import": "the script, before the Trainer exists",
    "configure_model": "LightningModule.configure_model",
    "setup": "LightningModule.setup",
    "step": "training_step",
    "backward": "an autograd function",
    "optimizer": "on_before_optimizer_step",
    "validation": "validation_step",
    "loader": "a worker process of the loader",
    "on_save_checkpoint": "LightningModule.on_save_checkpoint",
    "save": "pickling what on_save_checkpoint returned, while the file is written",
    "teardown": "LightningModule.teardown",
}


@dataclass(frozen=True, order=True)
class Case:
    """One run and its fault."""

    strategy: str
    launcher: str
    fault: str
    stage: str = "step"
    rank: int = 1
    """The rank that fails."""
    ranks: int = 2
    nodes: int = 1
    """The number of nodes, with an equal number of ranks each."""

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in asdict(self).items())


def all_cases() -> list[Case]:
    """Return every case, in an order that does not change."""
    return sorted({*_stages(), *_faults(), *_deaths_elsewhere(), *_loaders(), *_three_ranks(), *_two_nodes()})


def _stages() -> Iterator[Case]:
    """Errors at every stage."""
    for strategy in STRATEGIES:
        for number, stage in enumerate(STAGES):
            for shift, launcher in enumerate(LAUNCHERS):
                if strategy in ("paral_zero1", "paral_zero3") and launcher != LAUNCHERS[number % 2]:
                    continue
                for rank in _ranks(stage, number + shift):
                    yield Case(strategy, launcher, "exception", stage, rank)


def _ranks(stage: str, number: int) -> tuple[int, ...]:
    if stage == "import":
        return (1,)  # rank 0 starts the others
    if stage == "save":
        return (0,)  # which writes the file
    return (0, 1) if stage in ("setup", "step") else (number % 2,)


def _faults() -> Iterator[Case]:
    """Every fault in a training step."""
    for strategy in STRATEGIES:
        for launcher in LAUNCHERS:
            for number, fault in enumerate(FAULTS):
                ranks = (0, 1) if fault in ("exit_0", "sigkill") else (number % 2,)
                for rank in ranks if fault != "launcher_killed" else (1,):
                    yield Case(strategy, launcher, fault, "step", rank)


def _deaths_elsewhere() -> Iterator[Case]:
    """Deaths without an exception at other stages."""
    for strategy in ("paral_ddp", "paral_fsdp", "paral_zero2", "ddp"):
        for number, stage in enumerate(("import", "configure_model", "setup", "validation", "save", "teardown")):
            for shift, fault in enumerate(("exit_0", "sigkill", "os_exit_0")):
                launcher = LAUNCHERS[(number + shift) % 2]
                yield Case(strategy, launcher, fault, stage, _ranks(stage, number)[-1])


def _loaders() -> Iterator[Case]:
    for strategy in STRATEGIES:
        for number, launcher in enumerate(LAUNCHERS):
            yield Case(strategy, launcher, "sigkill", "loader", number)


def _three_ranks() -> Iterator[Case]:
    for strategy in ("paral_ddp", "paral_fsdp", "paral_zero2"):
        for launcher in LAUNCHERS:
            for fault in ("exception", "sigkill"):
                yield Case(strategy, launcher, fault, "step", 2, ranks=3)


def _two_nodes() -> Iterator[Case]:
    for strategy in ("paral_ddp", "paral_fsdp", "paral_zero2", "ddp"):
        for launcher in LAUNCHERS:
            for fault, rank in (("exception", 1), ("exception", 0), ("sigkill", 1), ("exit_0", 0)):
                yield Case(strategy, launcher, fault, "step", rank, nodes=2)


def select(cases: Iterable[Case], wanted: str) -> list[Case]:
    """Return the cases that match `wanted`, such as `strategy=paral_fsdp,rank=1`.

    Raises:
        ValueError: `wanted` has an unknown name.
    """
    pairs = dict(pair.split("=", 1) for pair in wanted.split(",") if pair)
    unknown = pairs.keys() - {field.name for field in fields(Case)}
    if unknown:
        raise ValueError(f"unknown: {sorted(unknown)}; known: {[field.name for field in fields(Case)]}")
    return [case for case in cases if all(str(getattr(case, key)) == value for key, value in pairs.items())]


def sample(cases: list[Case], number: int, seed: int) -> list[Case]:
    """Return `number` cases drawn at random."""
    return random.Random(seed).sample(cases, min(number, len(cases)))
