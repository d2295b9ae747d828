"""Let some ranks of a run fail or die, and resume from what the others save: `survived.py FOLDER CASE ...`.

Python and Lightning are imported once; ranks are forked. Prints one line of JSON for each case.
"""

import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_paral import CheckpointOptions
from lightning_paral.checkpoint.integrity import verify
from tests.contract.cases import strategy_of
from tests.launching import fork_ranks
from tests.models.resumable import GLOBAL_BATCH_SIZE, NUM_BATCHES, Resumable, fit

SECONDS_PER_RUN = 60.0
NUM_EPOCHS = 2


@dataclass
class Fault:
    """What happens to some ranks."""

    strategy: str
    world_size: int
    ranks: list[int]
    """The ranks that fail."""
    where: str = "forward"
    """`forward`, `backward`, `before update`, `inside update` or `batch end`."""
    batch: int = 6
    epoch: int = 0
    kill: bool = True
    """Whether the ranks are killed, and do not only raise an exception."""
    form: str | None = None
    weights_only: bool = False
    accumulate: int = 2
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Told:
    """What happened."""

    saved: list[str]
    warnings: list[list[str]]
    errors: list[str]
    seconds: float
    resumed: bool = False
    """Whether the resumed run had the losses of an uninterrupted one."""
    first: list[int] = field(default_factory=list)
    """The epoch and the number of the first batch of the resumed run."""


class Faulty(Resumable):
    """Draws dropout masks, and fails once at a given place."""

    fault: Fault | None = None

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[int, int], float] = {}
        """The loss of each batch, by epoch and number."""

    def happen(self, where: str) -> None:
        fault = self.fault
        if fault is None or where != fault.where or self.global_rank not in fault.ranks:
            return
        if (self.trainer.current_epoch, self.trainer.fit_loop.epoch_loop.batch_idx) == (fault.epoch, fault.batch):
            if fault.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError(f"of rank {self.global_rank}")

    def forward(self, x: Tensor) -> Tensor:
        # Random states of dead ranks are known only if all ranks draw the same number of values.
        even = GLOBAL_BATCH_SIZE % self.trainer.world_size == 0
        return super().forward(torch.nn.functional.dropout(x, 0.3 * even, training=self.training))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen[self.current_epoch, batch_idx] = loss.item()
        self.happen("forward")
        return loss

    def on_after_backward(self) -> None:
        self.happen("backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.happen("before update")

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        made["optimizer"].register_step_post_hook(lambda *_: self.happen("inside update"))
        return made

    def on_train_batch_end(self, *args: Any) -> None:
        self.happen("batch end")


def strategy_for(fault: Fault) -> Any:
    options = dict(fault.options)
    if fault.form is not None or options.get("async_save"):
        options["checkpoint"] = CheckpointOptions(fault.form, async_save=options.pop("async_save", False))  # type: ignore[arg-type]
    return strategy_of(fault.strategy, **options)


def run_ranks(world_size: int, function: Callable[[int], Any], folder: Path, store: Path) -> list[Any]:
    """Return what `function` returns on each forked rank, and `None` for those that were killed."""

    def report(rank: int) -> None:
        torch.save(function(rank), folder / f"told-{rank}.tmp")
        os.rename(folder / f"told-{rank}.tmp", folder / f"told-{rank}.pt")

    children = fork_ranks(world_size, store, report)
    deadline = time.monotonic() + SECONDS_PER_RUN
    for child in children:
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
    found = []
    for rank in range(world_size):
        file = folder / f"told-{rank}.pt"
        found.append(torch.load(file, weights_only=False) if file.exists() else None)
        file.unlink(missing_ok=True)
    return found


def train(fault: Fault, folder: Path, resume: Path | None, *, fails: bool) -> Any:
    module = Faulty()
    module.fault = fault if fails else None
    checkpoint = ModelCheckpoint(
        folder / "saved", "failed-{step}", save_on_exception=True, save_top_k=0, save_weights_only=fault.weights_only
    )
    if fault.options.get("async_save"):
        checkpoint = ModelCheckpoint(
            folder / "saved", "{step}", save_on_exception=True, save_top_k=-1, every_n_train_steps=2
        )
    options: dict[str, Any] = {"callbacks": [checkpoint], "enable_checkpointing": True} if fails else {}
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fit(
                strategy_for(fault),
                fault.world_size,
                module=module,
                resume_from=resume,
                accumulate_grad_batches=fault.accumulate,
                max_epochs=NUM_EPOCHS,
                **options,
            )
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
    kept = [str(each.message) for each in caught if "save" in str(each.message)]
    weights = {name: value.detach().cpu().clone() for name, value in module.named_parameters()} if not error else {}
    return {"losses": module.seen, "weights": weights, "error": error, "warnings": kept}


def let_fail(fault: Fault, folder: Path) -> Told:
    folder.mkdir(parents=True)
    started = time.monotonic()
    told = run_ranks(fault.world_size, lambda _: train(fault, folder, None, fails=True), folder, folder / "store-1")
    seconds = time.monotonic() - started
    saved = sorted((folder / "saved").glob("*.ckpt"))
    for path in saved:
        assert not verify(path), verify(path)
    result = Told(
        saved=[path.name for path in saved],
        warnings=[[] if each is None else each["warnings"] for each in told],
        errors=["" if each is None else each["error"] for each in told],
        seconds=seconds,
    )
    if saved and not fault.weights_only:
        newest = max(saved, key=lambda path: path.stat().st_mtime_ns)
        result.first = check_resumed(fault, folder, newest)
        result.resumed = True
    return result


def check_resumed(fault: Fault, folder: Path, path: Path) -> list[int]:
    """Resume from `path`, check that the run has the losses and weights of an uninterrupted one; return its start."""
    resumed, whole = (
        run_ranks(
            fault.world_size,
            lambda _, found=found: train(fault, folder, found, fails=False),  # type: ignore[misc]
            folder,
            folder / f"store-{number}",
        )
        for number, found in ((2, path), (3, None))
    )
    for one, other in zip(resumed, whole, strict=True):
        assert not one["error"], one["error"]
        numbers = sorted(one["losses"])
        assert numbers, "nothing was left to train"
        everything = [(epoch, batch) for epoch in range(NUM_EPOCHS) for batch in range(NUM_BATCHES)]
        assert numbers == everything[everything.index(numbers[0]) :], numbers
        expected = [other["losses"][number] for number in numbers]
        torch.testing.assert_close([one["losses"][n] for n in numbers], expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one["weights"], other["weights"], rtol=1e-5, atol=1e-6)
    return list(numbers[0])


def main() -> None:
    folder, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    for number, case in enumerate(cases):
        fault = Fault(**json.loads(case))
        if "zero" in fault.strategy:
            import deepspeed  # noqa: F401  once, not in every child
        print(json.dumps(asdict(let_fail(fault, Path(folder, str(number))))), flush=True)


if __name__ == "__main__":
    main()
