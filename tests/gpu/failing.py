"""A fit in which rank 1 fails alone: `python -m tests.gpu.failing DEVICE STRATEGY`, once per rank."""

import sys

from torch import Tensor

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer

SECONDS = 20.0
"""How long a rank waits for the other in a collective."""


class Failing(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.trainer.global_rank == 1:
            raise ValueError("rank 1 fails alone")
        return super().training_step(batch, batch_idx)


if __name__ == "__main__":
    device, strategy = sys.argv[1:]
    made = {"ddp": ParalDDPStrategy, "fsdp": ParalFSDPStrategy}[strategy](timeout=SECONDS)
    options = {"accelerator": "gpu" if device == "cuda" else "cpu", "devices": 1, "num_nodes": 2}
    quiet_trainer(max_epochs=1, strategy=made, **options).fit(Failing(), regression_data(50, 2))
