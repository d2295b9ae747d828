"""Checkpoints on one rank: save under one strategy and resume under others; save in the background."""

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_paral import CheckpointOptions
from tests.contract.cases import BY_LABEL, strategy_of
from tests.gpu.place import check_installed, options_of, trainer_options
from tests.gpu.report import write_json
from tests.models.resumable import NUM_BATCHES, SAVED_AFTER, fit

ASYNC = ("paral_ddp", "paral_fsdp", "paral_fsdp_offload", "paral_zero2", "paral_zero3")


class StateBesideWeights(Callback):
    """Checks in the first step that optimizer state is on the device of its parameter."""

    def __init__(self) -> None:
        self.apart: list[str] = []

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if type(trainer.strategy).__name__ == "ParalZeROStrategy" or self.apart:
            return
        for optimizer in trainer.optimizers:
            for parameter, state in optimizer.state.items():
                for name, value in state.items():
                    if torch.is_tensor(value) and value.dim() and value.device != parameter.device:
                        self.apart.append(f"{name} on {value.device}, its parameter on {parameter.device}")


def _options(label: str, device: str) -> dict[str, Any]:
    """Return the Trainer's options without `devices`, which `tests.models.resumable.fit` sets."""
    options = options_of(label, device)
    return {name: value for name, value in options.items() if name != "devices"}


def save(label: str, device: str, folder: str) -> dict[str, Any]:
    """Train and save in the middle of an epoch; record the losses of the rest of the run."""
    path = Path(folder, label)
    losses = fit(world_size=1, save_to=path / "x.ckpt", **_options(label, device)).losses
    write_json(path / "losses.json", {str(number): loss for number, loss in losses.items()})
    return {"losses": len(losses)}


def resume(label: str, device: str, folder: str, sources: list[str]) -> dict[str, Any]:
    """Resume from the checkpoint of each of `sources`; the losses must be those of the run that saved."""
    facts: dict[str, Any] = {"failures": []}
    for source in sources:
        path = Path(folder, source)
        if not (path / "losses.json").exists():
            facts[source] = "not saved"
            continue
        expected = json.loads((path / "losses.json").read_text())
        beside = StateBesideWeights()
        options = _options(label, device) | {"callbacks": [beside]}
        losses = fit(world_size=1, resume_from=path / "x.ckpt", **options).losses
        _compare(facts, source, losses, expected, max(BY_LABEL[source].tolerance, BY_LABEL[label].tolerance))
        facts["failures"] += [f"resumed from {source}: {apart}" for apart in beside.apart[:1]]
    if all(value == "not saved" for value in facts.values() if not isinstance(value, list)):
        facts["failures"].append("nothing was saved to resume from")
    return facts


def async_save(label: str, device: str, folder: str) -> dict[str, Any]:
    """Save in the background while training goes on and changes the weights, then resume."""
    check_installed(label)
    facts: dict[str, Any] = {"failures": []}
    path = Path(folder, f"async-{label}", "x.ckpt")
    options = {name: value for name, value in trainer_options(device).items() if name != "devices"}
    in_background = CheckpointOptions(async_save=True)
    saved = fit(strategy_of(label, checkpoint=in_background), 1, save_to=path, **options).losses
    resumed = fit(strategy_of(label), 1, resume_from=path, **options).losses
    _compare(facts, "resumed", resumed, {str(number): loss for number, loss in saved.items()}, 1e-5)
    return facts


def _compare(
    facts: dict[str, Any], name: str, losses: dict[int, float], expected: dict[str, float], tolerance: float
) -> None:
    if list(losses) != list(range(SAVED_AFTER, NUM_BATCHES)):
        facts["failures"].append(f"{name}: went on with batches {list(losses)}")
        return
    worst = max(abs(loss / expected[str(number)] - 1) for number, loss in losses.items())
    facts[name] = worst
    if not worst <= tolerance:
        facts["failures"].append(f"{name}: losses off by {worst:.3g}, more than {tolerance:g}")
