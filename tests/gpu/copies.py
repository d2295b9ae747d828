"""Saving on CUDA: overlapped copies arrive intact, and use no GPU memory.

The checks of this file assert what must hold.
"""

import tempfile
from pathlib import Path

import torch

from lightning_paral.checkpoint.io.staging import Staging
from lightning_paral.checkpoint.load import load
from lightning_paral.checkpoint.save import SaveJob
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.options import Form


def _busy() -> None:
    """Keep the computing stream busy, so that a copy that does not wait for it reads old values."""
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]


def save(form: Form, staged: bool) -> None:
    """A save has the values computed last, although the stream that computes them is behind."""
    folder = tempfile.TemporaryDirectory()
    path = Path(folder.name, "saved")
    weight = torch.zeros(30_000_000, device="cuda")  # several buffers
    half = torch.zeros(3000, 1000, device="cuda", dtype=torch.bfloat16)
    seen = torch.zeros(1000, device="cuda")
    _busy()
    weight += torch.arange(30_000_000, device="cuda")
    half.t().copy_(torch.arange(3000, device="cuda").expand(1000, 3000))
    checkpoint = {"state_dict": {"weight": weight, "half": half.t()}, "callbacks": {"seen": seen}}
    save = SaveJob.prepare(checkpoint, path, form, RankGroup(), set(), "Test")
    staging = Staging(pin=True)
    if staged:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        save.stage(staging)
        extra = torch.cuda.max_memory_allocated() - before
        assert extra <= half.nbytes + 512, f"{extra} bytes on the GPU"  # it is transposed, and the allocator rounds up
        for value in (weight, half, seen):
            value.fill_(-1.0)
    save.write(RankGroup())

    loaded = load(str(path), RankGroup(), weights_only=True)
    assert torch.equal(loaded["state_dict"]["weight"].clone(), torch.arange(30_000_000).float())
    assert torch.equal(loaded["state_dict"]["half"].clone(), torch.arange(3000).expand(1000, 3000).bfloat16())
    assert not loaded["callbacks"]["seen"].any()
    staging.release()
    folder.cleanup()
