"""Checkpoints: save on one rank or on two, resume on one under every strategy; save in the background."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from lightning_paral import CheckpointOptions
from tests.contract.cases import BY_LABEL, strategy_of
from tests.gpu.place import Facts, check_installed, num_ranks, of_ranks, options_of, trainer_options
from tests.models.resumable import NUM_BATCHES, SAVED_AFTER, fit, mean_losses

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


def _without_devices(options: dict[str, Any]) -> dict[str, Any]:
    """Return the Trainer's options without `devices`, which `tests.models.resumable.fit` sets."""
    return {name: value for name, value in options.items() if name != "devices"}


def save(label: str, device: str, folder: str) -> Facts:
    """Train and save in the middle of an epoch; record the losses of the rest of the run. *Collective*."""
    path, facts = Path(folder, label), Facts()
    found = of_ranks(fit(world_size=1, save_to=path / "x.ckpt", **_without_devices(options_of(label, device))).losses)
    losses = mean_losses(found)
    if os.environ.get("RANK", "0") == "0":
        (path / "losses.json").write_text(json.dumps(losses))
    of_ranks(num_ranks())  # until it is written
    facts["losses"] = len(losses)
    return facts


def resume(label: str, device: str, folder: str, sources: list[str]) -> Facts:
    """Resume from the checkpoint of each of `sources`; the losses must be those of the run that saved."""
    facts = Facts()
    for source in sources:
        path = Path(folder, source)
        if not (path / "losses.json").exists():
            facts[source] = "not saved"
            continue
        beside = StateBesideWeights()
        options = _without_devices(options_of(label, device)) | {"callbacks": [beside]}
        losses = fit(world_size=1, resume_from=path / "x.ckpt", **options).losses
        tolerance = max(BY_LABEL[source].tolerance, BY_LABEL[label].tolerance)
        _compare(facts, source, losses, json.loads((path / "losses.json").read_text()), tolerance)
        facts["failures"] += [f"resumed from {source}: {apart}" for apart in beside.apart[:1]]
    facts.require(any(facts.get(source) != "not saved" for source in sources), "nothing was saved to resume from")
    return facts


def async_save(label: str, device: str, folder: str) -> Facts:
    """Save in the background while training goes on and changes the weights, then resume."""
    check_installed(label)
    facts, path = Facts(), Path(folder, f"async-{label}", "x.ckpt")
    options = _without_devices(trainer_options(device))
    in_background = CheckpointOptions(async_save=True)
    saved = fit(strategy_of(label, checkpoint=in_background), 1, save_to=path, **options).losses
    resumed = fit(strategy_of(label), 1, resume_from=path, **options).losses
    _compare(facts, "resumed", resumed, {str(number): loss for number, loss in saved.items()}, 1e-5)
    return facts


def _compare(facts: Facts, name: str, losses: dict[int, float], expected: dict[str, float], tolerance: float) -> None:
    if list(losses) != list(range(SAVED_AFTER, NUM_BATCHES)):
        facts.require(False, f"{name}: went on with batches {list(losses)}")
        return
    facts.close(name, max(abs(loss / expected[str(number)] - 1) for number, loss in losses.items()), tolerance)
