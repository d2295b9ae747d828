"""Which runs are broken: strategy, launcher, fault, stage and rank."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from itertools import product

STRATEGIES = ("paral_ddp", "paral_fsdp", "paral_zero1", "paral_zero2", "paral_zero3")
BY_ENGINE = ("paral_ddp", "paral_fsdp", "paral_zero2")
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

    @property
    def has_traceback(self) -> bool:
        """Whether the rank raises an error."""
        return self.fault in ("exception", "others_sleep", "others_in_c")

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in asdict(self).items())


def all_cases() -> list[Case]:
    """Return every case, in an order that does not change."""
    found: set[Case] = set()
    for strategy, (turn, launcher) in product(STRATEGIES, enumerate(LAUNCHERS)):
        for number, stage in enumerate(STAGES, turn):
            ranks = (0, 1) if stage in ("setup", "step") else (_rank(stage, number),)
            found |= {Case(strategy, launcher, "exception", stage, rank) for rank in ranks}
        for number, fault in enumerate(FAULTS):
            ranks = (0, 1) if fault in ("exit_0", "sigkill") else (number % 2,)
            found |= {Case(strategy, launcher, fault, "step", rank) for rank in ranks if fault != "launcher_killed"}
        found |= {Case(strategy, launcher, "launcher_killed"), Case(strategy, launcher, "sigkill", "loader", turn)}
    for strategy, launcher in product(BY_ENGINE, LAUNCHERS):
        stages = ("import", "configure_model", "setup", "validation", "save", "teardown")
        for fault, (number, stage) in product(("exit_0", "sigkill", "os_exit_0"), enumerate(stages)):
            # torchrun takes status 0 for a regular end
            if fault == "sigkill" or stage != "teardown" or (launcher == "python" or fault == "exit_0"):
                found.add(Case(strategy, launcher, fault, stage, _rank(stage, number)))
        for fault in ("exception", "sigkill"):
            found.add(Case(strategy, launcher, fault, "step", 2, ranks=3))
        for fault, rank in (("exception", 1), ("exception", 0), ("sigkill", 1), ("exit_0", 0)):
            found.add(Case(strategy, launcher, fault, "step", rank, nodes=2))
    return sorted(found)


def _rank(stage: str, number: int) -> int:
    """Return the rank that fails: rank 0 starts the others after imports, and writes the file of a save."""
    return {"import": 1, "save": 0}.get(stage, number % 2)


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
