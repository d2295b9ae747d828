"""Mixed precision gathers floating-point parameters in 16 bits, and all others in their own dtype."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class OfSeveralDtypes(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.tensor([1001, 3, 70001]), requires_grad=False)
        self.wave = nn.Parameter(torch.tensor([1 + 2j, 3 - 4j, 0.5j]), requires_grad=False)
        self.seen: list[tuple[Tensor, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((self.table.detach().clone(), self.wave.detach().clone()))
        return super().training_step(batch, batch_idx)


def seen_in_steps() -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    module = OfSeveralDtypes()
    trainer = quiet_trainer(strategy="paral_fsdp", devices=2, max_steps=2, precision="bf16-mixed")
    trainer.fit(module, regression_data(2, 2))
    return module.seen, module.table


def test_integers_and_complex_numbers_keep_their_dtype(on_ranks) -> None:
    expected = OfSeveralDtypes()
    for seen, after in on_ranks(2, seen_in_steps):
        assert len(seen) == 2
        for table, wave in seen:
            assert torch.equal(table, expected.table)
            assert torch.equal(wave, expected.wave)
        assert torch.equal(after, expected.table)
