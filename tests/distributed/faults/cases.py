"""Which runs are broken: strategy, launcher, fault, stage and rank."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, order=True)
class Case:
    """One run and its fault, which `failing.py` has at a stage of the run."""

    strategy: str
    launcher: str
    fault: str
    stage: str = "step"
    rank: int = 1
    """The rank that fails."""
    ranks: int = 2

    @property
    def has_traceback(self) -> bool:
        """Whether the rank raises an error."""
        return self.fault in ("exception", "others_sleep", "others_in_c")

    def __str__(self) -> str:
        return ",".join(f"{key}={value}" for key, value in asdict(self).items())


CASES = (
    Case("paral_fsdp", "python", "exception", "step", 0),
    Case("paral_fsdp", "torchrun", "exception", "backward", 1),
    Case("paral_ddp", "python", "sigkill", "step", 1),
    Case("paral_ddp", "torchrun", "exit_0", "step", 0),
    Case("paral_zero2", "python", "exception", "validation", 0),
    Case("paral_zero3", "torchrun", "sigkill", "step", 1),
    Case("paral_ddp", "python", "others_in_c", "step", 1),
    Case("paral_ddp", "python", "exception", "import", 1),
    Case("paral_ddp", "torchrun", "exit_0", "teardown", 1),
    Case("paral_ddp", "torchrun", "os_exit_0", "step", 1),
    Case("paral_ddp", "python", "exit_0", "teardown", 1),
    Case("paral_ddp", "python", "os_exit_0", "teardown", 1),
    Case("paral_fsdp", "python", "launcher_killed", "step", 1),
    Case("paral_ddp", "torchrun", "launcher_killed", "step", 1),
    Case("paral_zero1", "python", "exit_3", "step", 0),
    Case("paral_ddp", "torchrun", "sigsegv", "step", 1),
    Case("paral_fsdp", "torchrun", "os_exit_1", "step", 0),
    Case("paral_zero2", "python", "ctrl_c", "step", 1),
    Case("paral_zero3", "python", "others_sleep", "step", 1),
    Case("paral_zero3", "torchrun", "exception", "configure_model", 0),
    Case("paral_zero1", "python", "exception", "setup", 1),
    Case("paral_fsdp", "python", "exception", "optimizer", 1),
    Case("paral_ddp", "torchrun", "exception", "loader", 1),
    Case("paral_fsdp", "python", "sigkill", "loader", 0),
    Case("paral_zero2", "torchrun", "exception", "on_save_checkpoint", 1),
    Case("paral_fsdp", "python", "sigkill", "save", 0),
    Case("paral_ddp", "python", "exception", "step", 2, ranks=3),
)
"""Each fault and each stage at least once.

Two faults come from outside of the rank: the terminal sends SIGINT (`ctrl_c`), and the process that started the ranks,
rank 0 or torchrun's agent, is killed (`launcher_killed`).
"""
