"""Which runs are broken: strategy, launcher, fault, stage and rank."""

from dataclasses import asdict, dataclass

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
"""Each fault and each stage at least once."""
