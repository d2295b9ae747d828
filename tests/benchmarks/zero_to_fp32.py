"""Converting the weights of a folder that DeepSpeed saved, beside DeepSpeed's own `zero_to_fp32`.

    python -m tests.benchmarks.zero_to_fp32

The model has 201 million parameters. Printed are seconds, and the growth of memory or its peak.
"""

import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.rank_pool import RankPool
from tests.running import quiet_trainer

WIDTH = 2048
NUM_LAYERS = 48


class Wide(LightningModule):
    """A model of 48 square layers with 201 million parameters."""

    def __init__(self, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.ones(1, WIDTH)
        for layer in self.layers:
            x = layer(x)
        return x.mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


CONSOLIDATE = """
import sys, threading, time
from lightning_paral.cli.consolidate import consolidate

def anonymous_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

peak = before = anonymous_bytes()
running = True
def watch():
    global peak
    while running:
        peak = max(peak, anonymous_bytes())
        time.sleep(0.005)
watcher = threading.Thread(target=watch)
watcher.start()
begin = time.perf_counter()
consolidate(sys.argv[1:])
seconds = time.perf_counter() - begin
running = False
watcher.join()
print("MEASURED", seconds, peak - before)
"""


def consolidated(source: Path, out: Path, *options: str) -> tuple[float, float]:
    """Return the seconds, and the growth of anonymous memory in MiB."""
    command = [sys.executable, "-c", CONSOLIDATE, str(source), str(out), *options]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    _, seconds, growth_bytes = printed.splitlines()[-1].split()
    return float(seconds), int(growth_bytes) / 2**20


def save_with_deepspeed(folder: str) -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from lightning_paral import ParalZeROStrategy

    class Saving(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.exclude_frozen_parameters = False
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(True)
            DeepSpeedStrategy.save_checkpoint(trainer.strategy, checkpoint, folder)

    strategy = ParalZeROStrategy(stage=3, timeout=timedelta(minutes=10))
    quiet_trainer(max_steps=1, devices=2, strategy=strategy, callbacks=[Saving()]).fit(Wide(), DataLoader(range(2)))  # type: ignore[arg-type]


ZERO_TO_FP32 = """
import resource, sys, time
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
begin = time.perf_counter()
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], max_shard_size="100GB")
print("MEASURED", time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def main(folder: Path) -> None:
    """Print the table."""
    pool = RankPool()
    try:
        pool.run(2, save_with_deepspeed, str(folder / "deepspeed"), timeout=580)
    finally:
        pool.close()
    spent, growth = consolidated(folder / "deepspeed", folder / "weights.ckpt", "--weights-only")
    command = [sys.executable, "-c", ZERO_TO_FP32, str(folder / "deepspeed"), str(folder / "theirs")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
    _, theirs, peak_bytes = printed.splitlines()[-1].split()
    rows = [
        ("paral consolidate --weights-only", spent, f"grows by {growth:.0f}"),
        ("zero_to_fp32", float(theirs), f"peak {int(peak_bytes) / 2**20:.0f}"),
    ]
    print(tabulate(rows, headers=("", "s", "memory, MiB"), floatfmt=".2f"))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as temporary:
        main(Path(temporary))
