"""A user's training script that the tests preempt: `preempted_script.py FOLDER STRATEGY WITH_CALLBACK`.

It writes the losses of each rank to `FOLDER/losses-RANK`, and resumes as Lightning decides.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_paral import Preemption
from tests.models.linear import Linear
from tests.running import quiet_trainer

FOLDER, STRATEGY, CALLBACK = Path(sys.argv[1]), sys.argv[2], sys.argv[3]


class Slow(Linear):
    """Writes its losses, and takes a while for each batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.1)
        loss = super().training_step(batch[0], batch_idx)
        with (FOLDER / f"losses-{self.trainer.global_rank}").open("a") as file:
            file.write(f"{self.trainer.current_epoch} {batch_idx} {loss.item()!r}\n")
        return loss


if __name__ == "__main__":
    torch.manual_seed(0)
    preemption = Preemption(exit_status={"return": "return", "zero": 0}.get(CALLBACK, "signal"))
    trainer = quiet_trainer(
        devices=2,
        strategy=STRATEGY,
        max_epochs=3,
        callbacks=[] if CALLBACK == "none" else [preemption],
        default_root_dir=FOLDER,
    )
    data = torch.utils.data.TensorDataset(torch.randn(40, 4))
    trainer.fit(Slow(), DataLoader(data, batch_size=2, shuffle=True))
    print(f"rank {trainer.global_rank} returned: {preemption.was_preempted}", flush=True)
