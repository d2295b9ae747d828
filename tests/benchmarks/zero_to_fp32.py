"""Converting the weights of a folder that DeepSpeed saved, beside DeepSpeed's own `zero_to_fp32`.

    python -m tests.benchmarks.zero_to_fp32

The model has 201 million parameters. Printed are seconds, and the growth of anonymous memory.
"""

import subprocess
import sys
import tempfile
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.benchmarks.common import print_table, silent_ranks
from tests.running import quiet_trainer

WIDTH = 2048
NUM_LAYERS = 48


class Wide(LightningModule):
    """A model of 48 square layers with 201 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(torch.ones(1, WIDTH)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


def save_with_deepspeed(folder: str) -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from lightning_paral import ParalZeROStrategy

    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.exclude_frozen_parameters = False
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(True)
            DeepSpeedStrategy.save_checkpoint(trainer.strategy, checkpoint, folder)

    strategy = ParalZeROStrategy(stage=3, timeout=600.0)
    quiet_trainer(max_steps=1, devices=2, strategy=strategy, callbacks=[Saving()]).fit(Wide(), DataLoader(range(2)))  # type: ignore[arg-type]


CONSOLIDATE = "from lightning_paral.cli.consolidate import consolidate as run; arguments = [sys.argv[1:]]"
ZERO_TO_FP32 = """
from functools import partial
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
run, arguments = partial(convert_zero_checkpoint_to_fp32_state_dict, max_shard_size="100GB"), sys.argv[1:]
"""
MEASURE = """
watch, begin = Watch(), time.perf_counter()
run(*arguments)
print("MEASURED", time.perf_counter() - begin, *watch.end())
"""


def seconds_and_bytes(what: str, *arguments: str) -> tuple[float, int]:
    """Return the seconds of a conversion in a new process, and the growth of its anonymous memory."""
    script = f"import sys, time\nfrom tests.benchmarks.peak import Watch\n{what}\n{MEASURE}"
    command = [sys.executable, "-c", script, *arguments]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    _, seconds, own_bytes, _ = printed.splitlines()[-1].split()
    return float(seconds), int(own_bytes)


def main(folder: str) -> None:
    saved = f"{folder}/deepspeed"
    with silent_ranks() as on_ranks:
        on_ranks(2, save_with_deepspeed, saved)
    ours = seconds_and_bytes(CONSOLIDATE, saved, f"{folder}/weights.ckpt", "--weights-only")
    theirs = seconds_and_bytes(ZERO_TO_FP32, saved, f"{folder}/theirs")
    rows = [
        (name, seconds, num_bytes / 2**20)
        for name, (seconds, num_bytes) in (("paral consolidate --weights-only", ours), ("zero_to_fp32", theirs))
    ]
    print_table(("", "s", "memory grows by, MiB"), rows, ("", ".2f", ".0f"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as temporary:
        main(temporary)
