"""A finished run frees its memory: weights, gradients, optimizer state, and buffers of engines and saves."""

import gc
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_paral import ActivationCheckpointing, CheckpointOptions, ParalDDPStrategy, ParalFSDPStrategy
from lightning_paral.engines.zero.user_access import HiddenGradientError
from tests.contract.cases import BY_LABEL
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer

LABELS = [
    "paral_ddp", "paral_ddp_ring", "paral_fsdp", "paral_fsdp_offload", "fsdp_hybrid", "paral_zero1", "paral_zero2",
    "paral_zero3", "paral_zero3_offload",
]  # fmt: skip
IN_BACKGROUND = CheckpointOptions(async_save=True)
RECOMPUTED = ActivationCheckpointing(units=["Linear"], offload_to_cpu=True)
OTHERS: dict[str, Any] = {
    "ddp_async_recomputed": lambda: ParalDDPStrategy(checkpoint=IN_BACKGROUND, activation_checkpointing=RECOMPUTED),
    "fsdp_async_recomputed": lambda: ParalFSDPStrategy(checkpoint=IN_BACKGROUND, activation_checkpointing=RECOMPUTED),
}


class Watch(Callback):
    """Holds weak references to the run's parameters, gradients, optimizer states and a batch."""

    def __init__(self) -> None:
        self.storages: list[weakref.ref[Any]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        parameters = [p for network in (trainer.model, pl_module) for p in network.parameters()]
        found: list[Any] = list(parameters)
        with suppress(HiddenGradientError):  # under ZeRO only the count of tensors includes them
            found += [parameter.grad for parameter in parameters]
            found += tree_leaves(list(optimizer.state.values()))
        for tensor in (each for each in found if isinstance(each, Tensor)):
            shard = getattr(tensor, "_local_tensor", getattr(tensor, "ds_tensor", tensor))
            self.storages.append(weakref.ref(shard.untyped_storage()))


def fit_and_forget(make: Any, num_devices: int, folder: str) -> list[Any]:
    torch.manual_seed(3)
    watch, model = Watch(), Regression()
    save = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1, enable_version_counter=False)
    trainer = quiet_trainer(
        strategy=make(),
        devices=num_devices,
        max_epochs=1,
        gradient_clip_val=0.1,
        enable_checkpointing=True,
        callbacks=[watch, save],
    )
    trainer.fit(model, regression_data(2, dist.get_world_size() if dist.is_initialized() else 1))
    assert watch.storages
    return watch.storages


def tensors_alive() -> int:
    for _ in range(3):  # what the finalizers of one pass release is garbage of the next
        gc.collect()
    return sum(issubclass(type(each), Tensor) for each in gc.get_objects())


def left_by(labels: list[str], num_devices: int, folder: str) -> dict[str, tuple[int, int]]:
    """Return by label how many tensors and storages a fit leaves in memory.

    Tensors are counted after a second fit, relative to those after the first.
    """
    left = {}
    for label in labels:
        make = OTHERS[label] if label in OTHERS else BY_LABEL[label].strategy
        fit_and_forget(make, num_devices, f"{folder}/{label}")
        before = tensors_alive()
        storages = fit_and_forget(make, num_devices, f"{folder}/{label}")
        left[label] = tensors_alive() - before, sum(storage() is not None for storage in storages)
    return left


def test_no_tensor_outlives_its_run(on_ranks, tmp_path: Path) -> None:
    labels = [*LABELS, *OTHERS]
    for left in on_ranks(2, left_by, labels, 2, str(tmp_path)):
        assert left == dict.fromkeys(labels, (0, 0))


def test_no_tensor_of_paral_dp_outlives_its_run(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    assert left_by(["paral_dp"], 2, str(tmp_path)) == {"paral_dp": (0, 0)}
