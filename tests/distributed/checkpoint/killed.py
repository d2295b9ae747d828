"""Kill ranks repeatedly while they save.

    python -m tests.distributed.checkpoint.killed FOLDER STRATEGY FORM MODE NUM_KILLS SEED

Python and Lightning are imported once; each attempt is two forked ranks that resume from the newest checkpoint, train
and save after every step until both get a SIGKILL. After it, every checkpoint that has its name has to be complete.
"""

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_paral import CheckpointOptions
from lightning_paral.checkpoint.load import load, verify
from lightning_paral.distributed.exchange import RankGroup
from tests.contract.cases import strategy_of
from tests.launching import fork_ranks
from tests.models.resumable import fit


def train(folder: Path, strategy: str, options: CheckpointOptions) -> None:
    callback = ModelCheckpoint(
        folder, save_top_k=2, monitor="step", mode="max", save_last=True, every_n_train_steps=1, filename="{step}"
    )
    made = strategy_of(strategy, checkpoint=options)
    fit(made, 2, resume_from=newest(folder), num_batches=10_000, callbacks=[callback], enable_checkpointing=True)


def visible(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.ckpt") if not path.name.startswith(".")]


def step_of(path: Path) -> int:
    return int(load(path, RankGroup())["global_step"])


def newest(folder: Path) -> Path | None:
    return max(visible(folder), key=lambda path: path.stat().st_mtime, default=None)


def attempt_once(folder: Path, attempt: int, strategy: str, options: CheckpointOptions, chance: random.Random) -> None:
    before = moments(folder)
    store = folder.parent / f"store-{attempt}"
    children = fork_ranks(2, store, lambda rank: train(folder, strategy, options))
    deadline = time.monotonic() + 40
    try:
        # Wait until the run has saved, so that every attempt also shows that the previous one can be resumed.
        while moments(folder) == before:
            assert time.monotonic() < deadline, "no checkpoint came"
            assert os.waitpid(children[0], os.WNOHANG) == (0, 0), "a rank ended by itself"
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.25))
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    for child in children:
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "a rank ended by itself"


def moments(folder: Path) -> dict[str, int]:
    """Return the modification time of each checkpoint, without those that are removed meanwhile."""
    found = {}
    for path in visible(folder):
        with suppress(FileNotFoundError):
            found[path.name] = path.stat().st_mtime_ns
    return found


def kill_repeatedly(folder: Path, strategy: str, form: str, mode: str, num_kills: int, seed: int) -> dict[str, Any]:
    """Kill runs that save to `folder`; after each kill check that no checkpoint is lost, damaged or mixed."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if "zero" in strategy:
        import deepspeed  # noqa: F401  once, not in every child
    options = CheckpointOptions(form, async_save=mode == "async")  # type: ignore[arg-type]
    chance = random.Random(seed)
    best = 0
    for attempt in range(num_kills):
        attempt_once(folder, attempt, strategy, options, chance)
        found = visible(folder)
        assert found, "no checkpoint is left"
        for path in found:
            faults = verify(path)
            assert not faults, f"attempt {attempt}: {faults}"
            check_not_mixed(path)
        reached = max(map(step_of, found))
        assert reached >= best, f"attempt {attempt}: back at step {reached} from {best}"
        best = max(best, reached)
    return {"steps": best, "left": len(list(folder.glob(".*")))}


def check_not_mixed(path: Path) -> None:
    """Check that weights, optimizer and loops of a checkpoint are of the same step."""
    checkpoint = load(path, RankGroup())
    step = checkpoint["global_step"]
    counts = {int(state["step"]) for state in checkpoint["optimizer_states"][0]["state"].values() if "step" in state}
    assert counts == {step}, f"{path}: optimizer states of steps {counts} in a checkpoint of step {step}"
    rates = checkpoint["lr_schedulers"][0]
    assert rates["last_epoch"] == step, f"{path}: the scheduler is at {rates['last_epoch']}, not at {step}"


def main() -> None:
    folder, strategy, form, mode, num_kills, seed = sys.argv[1:]
    print(json.dumps(kill_repeatedly(Path(folder), strategy, form, mode, int(num_kills), int(seed))))


if __name__ == "__main__":
    main()
