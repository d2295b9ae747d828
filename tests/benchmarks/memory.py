"""Peaks of the resident memory of a rank while the example's GPT with 152 million parameters trains in fp32.

    python -m tests.benchmarks.memory

The peak is that of training on the rank that needs the most, less what imports take, beside what weights, gradients and
Adam's states need by the ZeRO paper's formula. After the fit, `paral_zero3` and `paral_fsdp` gather the full module in
host memory beside the optimizer state, which `end_bytes` includes. Each case has new processes.
"""

import argparse
import time
from importlib import import_module
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from examples.gpt import GPT, StandardLibraryData
from tests.benchmarks.common import show, silent_ranks
from tests.benchmarks.peak import Watch
from tests.running import quiet_trainer

STRATEGIES = ("ddp", "paral_ddp", "paral_zero1", "paral_zero2", "paral_zero3", "paral_fsdp")
SHARDED_BYTES = {"zero1": 8, "zero2": 12, "zero3": 16, "fsdp": 16}
"""Of the 16 bytes that a parameter needs in training, those that the ranks divide among them."""
CONTEXT = 64
NUM_STEPS = 3
"""The first step creates optimizer states; gradients of a step may exist until the next one computes its own."""


class BuiltLate(GPT):
    """The example's GPT, built in `configure_model`, so that strategies may shard it unit by unit."""

    def __init__(self, width: int) -> None:
        LightningModule.__init__(self)
        self.width = width
        self.hparams.update(learning_rate=1e-4, num_warmup_steps=1)

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            for name, part in GPT(self.width, num_layers=12, num_heads=16, context=CONTEXT).named_children():
                self.add_module(name, part)


class Phases(Callback):
    """Reads the time and the peak when the first step begins, and the peak when training ends."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.began = watch, time.perf_counter()
        self.found: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.found = {"start_seconds": time.perf_counter() - self.began, "start_bytes": self.watch.resident()}

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.found["peak_bytes"] = self.watch.resident()


def peaks(strategy: str, num_ranks: int, width: int) -> dict[str, Any]:
    """Return the peaks of this rank, and its number of parameters. *Collective*."""
    if "zero" in strategy:
        import_module("deepspeed")
        torch.compile(torch.nn.Identity())  # imports TorchInductor, as DeepSpeed's decorators do in a fit
    layer = torch.nn.Linear(8, 8)  # code takes memory when it first runs
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(8, 8)).sum().backward()
    optimizer.step()
    watch = Watch()
    phases = Phases(watch)
    module = BuiltLate(width)
    options = {"max_steps": NUM_STEPS, "limit_val_batches": 0, "callbacks": [phases]}
    quiet_trainer(strategy=strategy, devices=num_ranks, **options).fit(module, StandardLibraryData(1, CONTEXT))
    num_params = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())
    return phases.found | {"end_bytes": watch.end()[1], "num_params": num_params}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    rows = []
    for num_ranks in map(int, options.ranks.split(",")):
        for name in STRATEGIES:
            with silent_ranks() as on_ranks:
                ranks = on_ranks(num_ranks, peaks, name, num_ranks, options.width)
            most = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
            divided = SHARDED_BYTES.get(name.removeprefix("paral_"), 0)
            formula = most.pop("num_params") * (16 - divided + divided / num_ranks)
            rows.append({"name": name, "num_ranks": num_ranks, "formula_bytes": round(formula)} | most)
    show(rows)


if __name__ == "__main__":
    main()
