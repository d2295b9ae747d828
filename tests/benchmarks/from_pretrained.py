"""The host memory of a rank while `from_pretrained` loads in `configure_model`.

Measured from before `configure_model` to the first batch of a validation, which needs no gradients and no optimizer.
`own` is anonymous memory (`RssAnon`), read every millisecond. `resident` is `VmHWM`, which counts pages of the mapped
files as well: ranks of one machine share them, and the system takes them back when it needs memory.
"""

import ctypes
from typing import Any

import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from tests.benchmarks.peak import Watch
from tests.contract.cases import strategy_of
from tests.models.hugging_face import Wrapped, tokens
from tests.running import quiet_trainer

NUM_RANKS = 2
IDS = {"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0}
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
