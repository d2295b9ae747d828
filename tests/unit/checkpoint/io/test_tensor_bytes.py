"""Tensors are read as bytes, slice by slice, and through two buffers if they are on a GPU."""

import io
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.serialization import config

from lightning_paral.checkpoint.io.tensor_bytes import HostBytes
from lightning_paral.checkpoint.load import load
from lightning_paral.checkpoint.save import SaveJob
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.options import Form


@pytest.fixture
def through_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every tensor as one on another device, and small tensors as large ones."""
    monkeypatch.setattr(HostBytes, "is_copied", lambda _, tensor: True)
    monkeypatch.setattr(HostBytes, "buffer_bytes", 64)


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_a_save_through_buffers_writes_the_same_bytes(
    request: pytest.FixtureRequest, tmp_path: Path, form: Form
) -> None:
    weight = torch.randn(7, 9, generator=torch.Generator().manual_seed(1))
    states = {"weight": weight, "half": weight.t().half(), "flag": torch.tensor(True), "none": torch.empty(0, 2)}
    states["one"] = weight[:1, 0]  # contiguous, though its stride is 9

    def save(path: Path) -> None:
        checkpoint = {"epoch": 0, "global_step": 1, "state_dict": dict(states), "callbacks": {"mean": weight[0]}}
        SaveJob.prepare(checkpoint, path, form, RankGroup(), set(), "Test").write(RankGroup())

    save(tmp_path / "plain")
    request.getfixturevalue("through_buffers")
    save(tmp_path / "buffered")

    loaded = load(str(tmp_path / "buffered"), RankGroup(), weights_only=True)["state_dict"]
    for name, value in states.items():
        assert torch.equal(loaded[name].clone(), value), name
    if form == "sharded":  # files of full checkpoints contain names that differ
        plain = (tmp_path / "plain" / "__0_0.distcp").read_bytes()
        assert (tmp_path / "buffered" / "__0_0.distcp").read_bytes() == plain
        saved = io.BytesIO()  # as `torch.save` writes one tensor
        with config.patch({"save.compute_crc32": False}):
            torch.save(weight, saved)
        assert saved.getvalue() in plain


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_error_while_reading_tensors_is_raised(tmp_path: Path, form: Form) -> None:
    save = SaveJob.prepare({"state_dict": {"a": torch.ones(3)}}, tmp_path / "saved", form, RankGroup(), set(), "Test")

    def fail() -> Tensor:
        raise RuntimeError("the GPU has gone")

    save.items[0].shard = type(save.items[0].shard)(save.items[0].shard.chunks, fail)
    with pytest.raises(Exception, match="the GPU has gone"):
        save.write(RankGroup())
