"""Where a thread is, in words."""

import re
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

from lightning_paral.distributed.hangs import Place, place_of
from tests.running import quiet_trainer


def place_in(function: Callable[[], object], built_in: str) -> Place:
    """Call `function`, and return the place of the first call of a function written in C."""
    seen: list[Place] = []

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ == built_in:
            seen.append(place_of(traceback.walk_stack(frame)))

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen[0]


def line(text: str) -> str:
    """Return the file and line of this module whose code is `text`."""
    with open(__file__) as source:
        return f"test_frames.py:{next(number for number, each in enumerate(source, 1) if each.strip() == text)}"


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        time.sleep(0)
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit() -> None:
    quiet_trainer(devices=1, max_steps=1).fit(Module(), DataLoader(torch.ones(1, 2)))


def test_innermost_line_of_the_user_is_named() -> None:
    assert place_in(fit, "sleep") == Place(f"`training_step` ({line('time.sleep(0)')})", waits=False)


def test_collective_is_named_below_the_line_that_called_it() -> None:
    def tell() -> None:
        dist.all_reduce(torch.ones(1))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        place = place_in(tell, "wait")
    finally:
        dist.destroy_process_group()

    called_at = re.escape(line("dist.all_reduce(torch.ones(1))"))
    torchs = r"`all_reduce` \(torch/distributed/distributed_c10d.py:\d+\)"
    assert re.fullmatch(rf"`tell` \({called_at}\), in {torchs}", place.text)
    assert place.waits
