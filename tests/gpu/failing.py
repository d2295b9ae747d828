"""A fit in which rank 1 fails alone: `python -m tests.gpu.failing DEVICE BACKEND STRATEGY`, once per rank.

Both processes must end soon, and each must say what happened.
"""

import sys

from torch import Tensor

from tests.gpu.pair import join
from tests.gpu.place import trainer_options
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer

SECONDS = 20.0
"""How long a rank waits for the other in a collective."""
MESSAGE = "rank 1 fails alone"


class Failing(Regression):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.trainer.global_rank == 1:
            raise ValueError(MESSAGE)
        return super().training_step(batch, batch_idx)


def main() -> None:
    from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy

    device, backend, strategy = sys.argv[1:]
    if backend != "nccl":  # otherwise the strategy makes the group, as for users
        join(device, backend, SECONDS)
    made = {"ddp": ParalDDPStrategy, "fsdp": ParalFSDPStrategy}[strategy](timeout=SECONDS)
    trainer = quiet_trainer(max_epochs=1, strategy=made, **trainer_options(device))
    trainer.fit(Failing(), regression_data(50, 2))


if __name__ == "__main__":
    main()
