"""What is saved and converted is what was given, or an error."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_paral import CheckpointError
from lightning_paral.checkpoint.convert import convert
from lightning_paral.checkpoint.save import SaveJob
from lightning_paral.distributed.exchange import RankGroup
from lightning_paral.options import Form

FORMS: list[Form] = ["full", "sharded"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["out.ckpt", "out.safetensors"])
def test_checkpoint_of_another_tool_is_converted(tmp_path: Path, name: str) -> None:
    weights = {"a": torch.randn(7, 5), "b": torch.randn(3).bfloat16()}
    dcp.save({"state_dict": weights}, checkpoint_id=tmp_path / "dcp")
    torch.save({"epoch": 1, "global_step": 2}, tmp_path / "dcp" / "meta.pt")

    convert(str(tmp_path / "dcp"), str(tmp_path / name))

    if name.endswith("ckpt"):
        found = torch.load(tmp_path / name, weights_only=True)["state_dict"]
    else:
        found = pytest.importorskip("safetensors.torch").load_file(tmp_path / name)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], value) for key, value in weights.items())


@pytest.mark.parametrize("form", FORMS)
def test_tensor_without_values_is_refused(tmp_path: Path, form: Form) -> None:
    checkpoint = {"state_dict": {"a": torch.ones(2, device="meta")}}
    with pytest.raises(CheckpointError, match="has no values to save"):
        SaveJob.prepare(checkpoint, tmp_path / "x.ckpt", form, RankGroup(), strategy="Test")
