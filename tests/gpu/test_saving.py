"""Saving and offloading on CUDA: overlapped copies arrive intact, and use no GPU memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_paral.checkpoint.io.arena import Arena, _pin, _unpin, fresh_bytes
from lightning_paral.checkpoint.io.staging import Staging, copy_to_host
from lightning_paral.checkpoint.io.tensor_bytes import HostBytes
from lightning_paral.checkpoint.load import load
from lightning_paral.checkpoint.save import SaveJob
from lightning_paral.distributed.agreement import RankGroup
from lightning_paral.model.offloaded_inputs import OffloadedInputs
from lightning_paral.options import Form
from tests.gpu.test_ddp import NUM_GPUS

pytestmark = pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device")
MANY_CYCLES = 200_000_000


def busy() -> None:
    """Keep the computing stream busy, so that a copy that does not wait for it reads old values."""
    torch.cuda._sleep(MANY_CYCLES)  # type: ignore[no-untyped-call]


def test_arena_is_pinned_and_has_the_requested_size() -> None:
    arena = Arena(pin=True)
    arena.reserve(100_000_000)
    taken = arena.take(25_000_000, torch.float32)
    assert taken.is_pinned()
    assert arena.nbytes == 100_000_000
    value = torch.rand(25_000_000, device="cuda")
    taken.copy_(value, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(taken, value.cpu())
    arena.release()
    assert not taken.is_pinned()


def test_memory_that_cannot_be_pinned_is_used_unpinned() -> None:
    memory = fresh_bytes(2**21)
    assert _pin(memory)
    with pytest.warns(UserWarning, match="could not be pinned"):
        assert not _pin(memory)  # a second time
    assert torch.ones(3, device="cuda").sum().item() == 3.0  # the error is not attributed to this kernel
    _unpin(memory)


@pytest.mark.parametrize("form", ["full", "sharded"])
@pytest.mark.parametrize("staged", [False, True])
def test_save_has_the_values_computed_last(tmp_path: Path, form: Form, staged: bool) -> None:
    weight = torch.zeros(30_000_000, device="cuda")  # several buffers
    half = torch.zeros(3000, 1000, device="cuda", dtype=torch.bfloat16)
    seen = torch.zeros(1000, device="cuda")
    busy()
    weight += torch.arange(30_000_000, device="cuda")
    half.t().copy_(torch.arange(3000, device="cuda").expand(1000, 3000))
    checkpoint = {"state_dict": {"weight": weight, "half": half.t()}, "callbacks": {"seen": seen}}
    save = SaveJob.prepare(checkpoint, tmp_path / "saved", form, RankGroup(), set(), "Test")
    staging = Staging(pin=True)
    if staged:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        save.stage(staging)
        assert torch.cuda.max_memory_allocated() <= before + half.nbytes  # which is transposed
        for value in (weight, half, seen):
            value.fill_(-1.0)
    save.write(RankGroup())

    loaded = load(str(tmp_path / "saved"), RankGroup(), weights_only=True)
    assert torch.equal(loaded["state_dict"]["weight"].clone(), torch.arange(30_000_000).float())
    assert torch.equal(loaded["state_dict"]["half"].clone(), torch.arange(3000).expand(1000, 3000).bfloat16())
    assert not loaded["callbacks"]["seen"].any()
    staging.release()


def test_tensors_of_callbacks_are_copied_to_the_host() -> None:
    value = torch.arange(1000.0, device="cuda")
    parameter = nn.Parameter(torch.ones(5, device="cuda"))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    copy: dict[str, Any] = copy_to_host({"a": value, "view": value[10:], "parameter": parameter})
    assert torch.cuda.max_memory_allocated() == before
    assert {tensor.device.type for tensor in copy.values()} == {"cpu"}
    assert torch.equal(copy["a"], torch.arange(1000.0))
    assert copy["view"].untyped_storage().data_ptr() == copy["a"].untyped_storage().data_ptr()


def test_slices_are_correct_if_tensors_are_freed_meanwhile() -> None:
    def made_and_freed() -> Any:
        for number in range(8):
            busy()
            yield torch.full((HostBytes.buffer_bytes // 2 + number,), number, dtype=torch.uint8, device="cuda")

    with HostBytes(made_and_freed()) as source:
        for number in range(8):
            for view in source.read(HostBytes.buffer_bytes // 2 + number):
                torch.full((2**24,), 99, dtype=torch.uint8, device="cuda")  # reuses the freed memory
                assert (torch.frombuffer(view, dtype=torch.uint8) == number).all()


class Blocks(nn.Module):
    """Blocks whose inputs are most of the memory kept for backward."""

    def __init__(self, offloaded: OffloadedInputs | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(12))
        self.offloaded = offloaded

    def block(self, number: int, x: Tensor, mask: Tensor) -> Tensor:
        return torch.tanh(self.blocks[number](x)) * mask

    def forward(self, x: Tensor) -> Tensor:
        mask = (x.detach() > -1.0).float()
        for number in range(12):
            if self.offloaded is None:
                x = checkpoint(self.block, number, x, mask, use_reentrant=False)
            else:
                with self.offloaded.saving_inputs():
                    x = checkpoint(self.block, number, x, mask, use_reentrant=False)
        return x


def gradients(offloaded: OffloadedInputs | None, steps: int) -> tuple[list[Tensor], int]:
    model = Blocks(offloaded).cuda()
    x = torch.randn(2**15, 256, generator=torch.Generator().manual_seed(1)).cuda()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        busy()
        (model(x * (step + 1)).square().mean()).backward()
    torch.cuda.synchronize()
    return [parameter.grad.cpu() for parameter in model.parameters()], torch.cuda.max_memory_allocated()


def test_offloaded_inputs_are_restored_and_take_less_memory() -> None:
    expected, kept = gradients(None, 3)
    offloaded = OffloadedInputs()
    found, offloaded_bytes = gradients(offloaded, 3)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    assert offloaded_bytes < kept - 5 * 2**15 * 256 * 4  # of twelve inputs
    before = torch.cuda.memory_allocated()
    del offloaded
    assert torch.cuda.memory_allocated() == before
