"""A module's own `state_dict` and `load_state_dict` are called as under Lightning's ddp."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral.checkpoint.load import peek
from tests.contract.cases import PER_PLACEMENT, labels, strategy_of, with_ranks
from tests.models.resumable import Resumable, fit, mean_losses

STRATEGIES = labels(with_ranks(PER_PLACEMENT, 2))


class Renames(Resumable):
    """Saves `first` as `input` with doubled weights, omits frozen parameters, and undoes that when it loads."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        saved: dict[str, Any] = {"added": torch.ones(2)}
        for name, value in super().state_dict().items():
            if name.startswith("first."):
                saved[name.replace("first", "input")] = value * 2
            elif not name.startswith("frozen."):
                saved[name] = value
        return saved

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
        loaded: dict[str, Tensor] = {f"frozen.{name}": value for name, value in self.frozen.state_dict().items()}
        for name, value in state_dict.items():
            if name.startswith("input."):
                loaded[name.replace("input", "first")] = value / 2
            elif name != "added":
                loaded[name] = value
        if hasattr(self.frozen.weight, "ds_id"):  # partitioned, and not gathered here
            loaded = {name: value for name, value in loaded.items() if not name.startswith("frozen.")}
            return super().load_state_dict(loaded, strict=False)
        return super().load_state_dict(loaded, strict=strict)


def save_and_resume(path: str, strategy: str) -> list[dict[int, float]]:
    losses = []
    for keep in ("save_to", "resume_from"):
        torch.manual_seed(3)  # frozen parameters are not saved
        losses.append(fit(strategy_of(strategy), 2, module=Renames(), **{keep: path}).losses)  # type: ignore[arg-type]
    return losses


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_modules_own_state_dict_is_saved_and_loaded(on_ranks, tmp_path: Path, strategy: str) -> None:
    path = str(tmp_path / "x.ckpt")
    ranks = on_ranks(2, save_and_resume, path, strategy)
    names = peek(path)[1]["state_dict"].keys()
    assert {"added", "input.weight", "out.weight"} <= names
    assert not [name for name in names if name.startswith(("first", "frozen"))]
    expected, found = (mean_losses([rank[run] for rank in ranks]) for run in (0, 1))
    assert found
    for number, loss in found.items():
        assert loss == pytest.approx(expected[number], rel=1e-5)


class ReadsValues(Resumable):
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {
            name: value.sum(0, keepdim=True) if value.dim() else value for name, value in super().state_dict().items()
        }


def refused(path: str) -> str:
    try:
        fit("paral_zero3", 2, module=ReadsValues(), save_to=path)
    except Exception as error:
        return str(error)
    return ""


def test_state_dict_that_reads_sharded_values_is_refused(on_ranks, tmp_path: Path) -> None:
    for message in on_ranks(2, refused, str(tmp_path / "x.ckpt")):
        assert "a tensor of which this rank holds only a shard" in message


def test_unknown_names_raise_the_error_of_torch(tmp_path: Path) -> None:
    class Strict(Resumable):
        def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:  # type: ignore[override]
            return super().load_state_dict(state_dict, strict=strict)

    fit("paral_fsdp", 1, module=Renames(), save_to=tmp_path / "x.ckpt")
    with pytest.raises(RuntimeError, match=r"Missing key.*first\.weight"):
        fit("paral_fsdp", 1, module=Strict(), resume_from=tmp_path / "x.ckpt")
