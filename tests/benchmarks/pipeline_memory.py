"""Count the activations that a rank keeps at its peak for the backward pass, under `paral_pp` and in one process.

    python -m tests.benchmarks.pipeline_memory

Counted are the bytes of the tensors that autograd saves, each storage once, without parameters. With `"1f1b"`, a stage
keeps at most as many micro-batches as there are stages; with `"gpipe"`, all.
"""

import itertools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.gpt import GPT
from lightning_paral import ParalPipelineStrategy
from tests.benchmarks.common import print_table, silent_ranks
from tests.running import quiet_trainer

CONTEXT, BATCH_SIZE = 64, 16


class SavedBytes:
    """Counts the bytes that are saved for backward passes."""

    def __init__(self, parameters: Any) -> None:
        self._ignored = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._uses: Counter[int] = Counter()
        self._now = self.peak = 0

    def keep(self, tensor: Tensor) -> "_Saved":
        return _Saved(self, tensor)

    def add(self, tensor: Tensor, uses: int) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._ignored:
            return
        self._uses[address] += uses
        if self._uses[address] == max(uses, 0):  # the first use, or none any more
            self._now += uses * storage.nbytes()
        self.peak = max(self.peak, self._now)


class _Saved:
    def __init__(self, count: SavedBytes, tensor: Tensor) -> None:
        self._count, self.tensor = count, tensor
        count.add(tensor, 1)

    def __del__(self) -> None:
        self._count.add(self.tensor, -1)


class CountedGPT(GPT):
    """A GPT whose training step counts what autograd saves."""

    count: SavedBytes

    def on_train_start(self) -> None:
        # Those of other stages are of a class of their own, and have no storage.
        self.count = SavedBytes([each for each in self.parameters() if type(each) is nn.Parameter])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(self.count.keep, lambda saved: saved.tensor):
            return self.loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        """Log nothing."""


def peak(num_ranks: int, num_micro_batches: int, schedule: Any) -> int:
    torch.manual_seed(0)
    module = CountedGPT(width=64, num_layers=8, num_heads=4, context=CONTEXT)
    strategy: Any = "auto"
    if num_ranks > 1:
        strategy = ParalPipelineStrategy(micro_batches=num_micro_batches, schedule=schedule, check_steps=False)
    tokens = torch.randint(0, 256, (2 * BATCH_SIZE, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    trainer = quiet_trainer(devices=num_ranks, strategy=strategy, max_epochs=1)
    trainer.fit(module, DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), BATCH_SIZE))
    return module.count.peak


def main() -> None:
    """Print the table."""
    rows: list[list[Any]] = [["one process", 1, "", 1.0]]
    with silent_ranks() as on_ranks:
        alone = peak(1, 1, None)
        for num_ranks, num_micro_batches, schedule in itertools.product((2, 4), (4, 8), ("gpipe", "1f1b")):
            ranks = on_ranks(num_ranks, peak, num_ranks, num_micro_batches, schedule)
            rows.append([schedule, num_ranks, num_micro_batches, max(ranks) / alone])
    print_table(("", "ranks", "micro-batches", "largest peak"), rows, ".3f")


if __name__ == "__main__":
    main()
