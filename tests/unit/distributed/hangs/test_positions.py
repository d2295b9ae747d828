"""Where a thread is, in words."""

import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_paral.distributed.hangs.positions import Position, fold_stack, position_of
from tests.running import quiet_trainer


def positions_in(function: Callable[[], object], built_in: str) -> list[tuple[Position, str]]:
    """Call `function`, and return the position and the folded stack at each call of a function written in C."""
    seen = []

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ == built_in:
            frames = [each for each, _ in traceback.walk_stack(frame)]
            seen.append((position_of(frames), fold_stack(frames)))

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


def line(text: str) -> str:
    """Return the file and line of this module whose code is `text`."""
    with open(__file__) as source:
        return f"test_positions.py:{next(number for number, each in enumerate(source, 1) if each.strip() == text)}"


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.help()
        return self.layer(batch).sum()

    def help(self) -> None:
        time.sleep(0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit() -> None:
    quiet_trainer(devices=1, max_steps=1).fit(Module(), DataLoader(torch.ones(1, 2)))


def test_function_of_the_user_is_named_with_the_hook_that_called_it() -> None:
    ((position, stack),) = positions_in(fit, "sleep")

    where = f"`help` ({line('time.sleep(0)')}), called by `training_step` ({line('self.help()')})"
    assert position == Position("", where, waits_for_ranks=False)
    fitting, step = stack.index("in fit\n"), stack.index("in training_step\n")
    assert " calls in lightning, torch\n" in stack[fitting:step]
    assert stack.endswith("in help\n    time.sleep(0)\n")


def test_collective_is_named_by_its_public_name() -> None:
    def tell() -> None:
        dist.broadcast_object_list([1], src=0)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (position, _), *_ = positions_in(tell, "dump")
    finally:
        dist.destroy_process_group()

    where = f"`tell` ({line('dist.broadcast_object_list([1], src=0)')})"
    assert position == Position("in `broadcast_object_list`", where, True)
