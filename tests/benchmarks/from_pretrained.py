"""Measure the host memory of a rank while `from_pretrained` loads in `configure_model`, next to its shard of the model.

    python -m tests.benchmarks.from_pretrained

Measured from before `configure_model` to the first batch of a validation, which needs no gradients and no optimizer.
`own` is anonymous memory (`RssAnon`), read every millisecond. `resident` is `VmHWM`, which counts pages of the mapped
files as well: ranks of one machine share them, and the system takes them back when it needs memory.
"""

import ctypes
import itertools
import os
import tempfile
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from tests.benchmarks.common import print_table, silent_ranks
from tests.benchmarks.peak import Watch
from tests.contract.cases import strategy_of
from tests.models.hugging_face import Wrapped, made, tokens
from tests.running import quiet_trainer

NUM_RANKS = 2
IDS = {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}
STRATEGIES = ("paral_fsdp", "paral_zero3")
PRECISIONS = {"32-true": 4, "bf16-true": 2}
"""Bytes of an element, by precision."""
M_MMAP_THRESHOLD = -3


def large(width: int = 640) -> Any:
    """Return a model with many tensors of similar size, of about 200 MB at a width of 640."""
    config = transformers.GPT2Config(n_layer=10, n_embd=width, n_head=10, n_positions=64, **IDS)
    return transformers.GPT2LMHeadModel(config)


class Loaded(Wrapped):
    """Loads a model in `configure_model`."""

    def __init__(self, folder: str) -> None:
        super(Wrapped, self).__init__()
        self.folder = folder

    def configure_model(self) -> None:
        self.watch = Watch()
        self.model = transformers.GPT2LMHeadModel.from_pretrained(self.folder)

    def on_validation_start(self) -> None:
        self.peaks = self.watch.end()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Do nothing: all memory is measured before training."""


def peaks_of(label: str, folder: str, precision: Any = "32-true") -> tuple[int, int]:
    """Return this rank's peaks of anonymous and of all resident memory. *Collective* over the default group."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1024 * 1024)  # freed memory is returned to the system
    module = Loaded(folder)
    strategy = strategy_of(label)
    trainer = quiet_trainer(strategy=strategy, devices=NUM_RANKS, limit_val_batches=1, precision=precision)
    trainer.validate(module, DataLoader(tokens(), batch_size=4), verbose=False)
    return module.peaks


def main() -> None:
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    model, rows = large(), []
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as folder:
        made("GPT2LMHeadModel").save_pretrained(small)
        model.save_pretrained(folder, max_shard_size="50MB")
        for label, (precision, bytes_each) in itertools.product(STRATEGIES, PRECISIONS.items()):
            with silent_ranks() as on_ranks:
                on_ranks(NUM_RANKS, peaks_of, label, small, precision)  # loads modules that are imported at first use
                own, resident = map(max, zip(*on_ranks(NUM_RANKS, peaks_of, label, folder, precision), strict=True))
            whole = num_elements * bytes_each
            rows.append([label, precision, *(size / 1e6 for size in (whole, whole / NUM_RANKS, own, resident))])
    print(f"{num_elements:,} parameters in fp32 files on {NUM_RANKS} ranks; MB on the rank that needs most")
    print_table(("strategy", "precision", "whole", "its part", "own", "resident"), rows, ".1f")


if __name__ == "__main__":
    torch.manual_seed(1)
    main()
