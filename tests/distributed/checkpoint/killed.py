"""Kill ranks repeatedly while they save: `killed.py FOLDER STRATEGY FORM MODE NUM_KILLS SEED`.

Python and Lightning are imported once; each attempt is two forked ranks that resume from the newest checkpoint, train
and save after every step until both get a SIGKILL. After it, every checkpoint that has its name has to be complete.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_paral import CheckpointOptions
from lightning_paral.checkpoint.integrity import verify
from lightning_paral.checkpoint.load import load
from lightning_paral.distributed.agreement import RankGroup
from tests.contract.cases import strategy_of
from tests.models.resumable import fit


def train(rank: int, folder: Path, attempt: int, strategy: str, options: CheckpointOptions) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", TORCHELASTIC_RUN_ID="killed"
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    store = dist.FileStore(str(folder.parent / f"store-{attempt}"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    callback = ModelCheckpoint(
        folder, save_top_k=2, monitor="step", mode="max", save_last=True, every_n_train_steps=1, filename="{step}"
    )
    made = strategy_of(strategy, checkpoint=options)
    resume = newest(folder)
    fit(made, 2, resume_from=resume, num_batches=10_000, callbacks=[callback], enable_checkpointing=True)


def visible(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.ckpt") if not path.name.startswith(".")]


def step_of(path: Path) -> int:
    return int(load(path, RankGroup())["global_step"])


def newest(folder: Path) -> Path | None:
    return max(visible(folder), key=lambda path: path.stat().st_mtime, default=None)


def attempt_once(folder: Path, attempt: int, strategy: str, options: CheckpointOptions, chance: random.Random) -> None:
    before = moments(folder)
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                train(rank, folder, attempt, strategy, options)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(child)
    deadline = time.monotonic() + 40
    # Wait until the run has saved, so that every attempt also shows that the previous one can be resumed.
    while moments(folder) == before:
        assert time.monotonic() < deadline, "no checkpoint came"
        assert os.waitpid(children[0], os.WNOHANG) == (0, 0), "a rank ended by itself"
        time.sleep(0.002)
    time.sleep(chance.uniform(0.0, 0.25))
    for child in children:
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


def main(folder: Path, strategy: str, form: str, in_background: bool, num_kills: int, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    options = CheckpointOptions(form, async_save=in_background)  # type: ignore[arg-type]
    chance = random.Random(seed)
    best, leftovers = 0, 0
    for attempt in range(num_kills):
        attempt_once(folder, attempt, strategy, options, chance)
        found = visible(folder)
        assert found, "no checkpoint is left"
        for path in found:
            faults = verify(path)
            assert not faults, f"attempt {attempt}: {faults}"
        reached = max(map(step_of, found))
        assert reached >= best, f"attempt {attempt}: back at step {reached} from {best}"
        best = max(best, reached)
        leftovers += len(list(folder.glob(".*")))
    print(json.dumps({"kills": num_kills, "steps": best, "leftovers": leftovers, "left": len(list(folder.glob(".*")))}))


if __name__ == "__main__":
    folder, strategy, form, in_background, num_kills, seed = sys.argv[1:]
    main(Path(folder), strategy, form, in_background == "async", int(num_kills), int(seed))
