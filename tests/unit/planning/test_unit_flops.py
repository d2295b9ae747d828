"""The operations of units in a step are counted without running it, and equal a formula."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paral.options import ActivationCheckpointing
from lightning_paral.planning.unit_flops import count_unit_flops
from tests.running import quiet_trainer

BATCH, WIDTH, OUT = 4, 8, 50
WIDTHS = (8, 32, 16)


class Mlp(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner, bias=False)
        self.down = nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Uneven(LightningModule):
    """Blocks of different widths, a layer before them and a large head after them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Mlp(inner) for inner in WIDTHS)
        self.head = nn.Linear(WIDTH, OUT, bias=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


class CountedError(Exception):
    """Ends a fit once it has counted."""


class Counts(Callback):
    def __init__(self, names: list[str], options: dict[str, Any]) -> None:
        self.names, self.options = names, options
        self.found: list[int] = []

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        self.found = count_unit_flops(trainer, pl_module, self.names, **self.options)
        raise CountedError


def count(module: LightningModule, names: list[str], **options: Any) -> list[int]:
    counts, loader = Counts(names, options), DataLoader(torch.ones(2 * BATCH, WIDTH), BATCH)  # type: ignore[arg-type]
    with pytest.raises((CountedError, NotImplementedError)):  # Lightning's teardown cannot move parameters from meta
        quiet_trainer(max_steps=1, callbacks=[counts]).fit(module, loader)
    return counts.found


NAMES = ["blocks.0", "blocks.1", "blocks.2"]


def product(inputs: int, outputs: int) -> int:
    return 2 * BATCH * inputs * outputs


def test_counts_equal_the_formula_and_include_the_head_and_the_backward_pass() -> None:
    expected = [3 * 2 * product(WIDTH, inner) for inner in WIDTHS]
    expected[0] += product(WIDTH, WIDTH)  # the gradient of the first layer; its input needs none
    expected[-1] += 3 * product(WIDTH, OUT)

    plain = count(Uneven(), NAMES)
    with torch.device("meta"):
        without_values = Uneven()
    assert count(without_values, NAMES) == plain == expected
    # The last product of a unit is not needed again, and torch stops before it.
    recomputed = count(Uneven(), NAMES, checkpointing=ActivationCheckpointing(units=["Mlp"]))
    assert [more - less for more, less in zip(recomputed, plain, strict=True)] == [product(WIDTH, n) for n in WIDTHS]
