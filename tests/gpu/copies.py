"""Saving on CUDA: overlapped copies arrive intact, and use no GPU memory.

The checks of this file assert what must hold.
"""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_paral.checkpoint.io.arena import Arena, _pin, _unpin, fresh_bytes
from lightning_paral.checkpoint.io.staging import Staging, copy_to_host
from lightning_paral.checkpoint.io.tensor_bytes import HostBytes
from lightning_paral.checkpoint.load import load
from lightning_paral.checkpoint.save import SaveJob
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.options import Form


def _busy() -> None:
    """Keep the computing stream busy, so that a copy that does not wait for it reads old values."""
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]


def arena() -> None:
    """The arena is pinned, and has the requested size."""
    pinned = Arena(pin=True)
    pinned.reserve(100_000_000)
    taken = pinned.take(25_000_000, torch.float32)
    assert taken.is_pinned()
    assert pinned.nbytes == 100_000_000
    value = torch.rand(25_000_000, device="cuda")
    taken.copy_(value, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(taken, value.cpu())
    pinned.release()
    assert not taken.is_pinned()


def unpinned() -> None:
    """Memory that cannot be pinned is used unpinned, and the error is not attributed to the next kernel."""
    memory = fresh_bytes(2**21)
    assert _pin(memory)
    with pytest.warns(UserWarning, match="could not be pinned"):
        assert not _pin(memory)  # a second time
    assert torch.ones(3, device="cuda").sum().item() == 3.0
    _unpin(memory)


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
        assert torch.cuda.max_memory_allocated() <= before + half.nbytes  # which is transposed
        for value in (weight, half, seen):
            value.fill_(-1.0)
    save.write(RankGroup())

    loaded = load(str(path), RankGroup(), weights_only=True)
    assert torch.equal(loaded["state_dict"]["weight"].clone(), torch.arange(30_000_000).float())
    assert torch.equal(loaded["state_dict"]["half"].clone(), torch.arange(3000).expand(1000, 3000).bfloat16())
    assert not loaded["callbacks"]["seen"].any()
    staging.release()
    folder.cleanup()


def state_of_callbacks() -> None:
    """Tensors of callbacks are copied to the host, and views stay views."""
    value = torch.arange(1000.0, device="cuda")
    parameter = nn.Parameter(torch.ones(5, device="cuda"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    copy: dict[str, Any] = copy_to_host({"a": value, "view": value[10:], "parameter": parameter})
    assert torch.cuda.max_memory_allocated() == before
    assert {tensor.device.type for tensor in copy.values()} == {"cpu"}
    assert torch.equal(copy["a"], torch.arange(1000.0))
    assert copy["view"].untyped_storage().data_ptr() == copy["a"].untyped_storage().data_ptr()


def freed_tensors() -> None:
    """Slices are correct if tensors are freed meanwhile."""

    def made_and_freed() -> Any:
        for number in range(8):
            _busy()
            yield torch.full((HostBytes.buffer_bytes // 2 + number,), number, dtype=torch.uint8, device="cuda")

    with HostBytes(made_and_freed()) as source:
        for number in range(8):
            for view in source.read(HostBytes.buffer_bytes // 2 + number):
                torch.full((2**24,), 99, dtype=torch.uint8, device="cuda")  # reuses the freed memory
                assert (torch.frombuffer(view, dtype=torch.uint8) == number).all()
