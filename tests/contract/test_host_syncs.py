"""No step makes the host wait for the device: our code reads no tensor of the device in it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_paral.data import results
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.options import Sampling
from tests.contract.cases import BY_LABEL
from tests.host_syncs import HostSyncs
from tests.running import quiet_trainer

ON_THE_HOST = {
    "distributed/exchange.py: gather_int_lists: tolist",  # once in a second
    "distributed/rng_state.py: digest_of_torch_state: numpy",  # torch returns the states of generators on the host
}
"""Reads of tensors that are in host memory even if there is a GPU."""

LABELS = (
    *("paral_ddp", "ddp_small_buckets", "ddp_checkpointing", "paral_fsdp", "fsdp_hybrid_unsharded"),
    *("paral_fsdp_offload", "fsdp_checkpointing", "paral_zero1", "paral_zero2", "paral_zero2_offload", "paral_zero3"),
    "paral_zero3_offload",
)
OPTIONS: dict[str, dict[str, Any]] = {
    "automatic": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "manual": {},
    "bf16": {"precision": "bf16-mixed", "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
    "averaged": {},
}


class Normalized(LightningModule):
    """Has changing buffers, logs, and clips gradients itself in manual optimization."""

    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2))
        self.automatic_optimization = not manual

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = (self.net(batch) - batch[:, :2]).square().mean()
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.5, "norm")
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SelfSharding(IterableDataset[Tensor]):
    """A dataset that shards itself."""

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        for _ in range(8):
            yield torch.randn(4, 8, generator=generator)


class Between(Callback):
    """Counts from the end of the second step to the end of the sixth, which leaves out work done once."""

    def __init__(self, syncs: HostSyncs) -> None:
        self.syncs = syncs

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.syncs.is_counting = 1 <= batch_idx < 5


def syncs_of(label: str, kind: str, options: dict[str, Any]) -> tuple[dict[str, int], int]:
    torch.manual_seed(0)
    syncs = HostSyncs()
    callbacks: list[Callback] = [Between(syncs)]
    if kind == "averaged":
        callbacks.append(EMAWeightAveraging(decay=0.9))
    case = BY_LABEL[label].strategy() if label in BY_LABEL else label
    options = options | OPTIONS[kind]
    if "zero" in label and kind == "bf16":
        del options["gradient_clip_algorithm"]  # DeepSpeed does not clip by value
    trainer = quiet_trainer(strategy=case, max_epochs=1, callbacks=callbacks, **options)
    loader: Any = DataLoader(torch.randn(64, 8), 4)
    sampling = getattr(trainer.strategy, "sampling", None)
    if isinstance(sampling, Sampling) and kind == "manual":
        trainer.strategy.sampling = replace(sampling, shard_iterable=False)  # type: ignore[attr-defined]
        loader = DataLoader(SelfSharding(), batch_size=None)
    with syncs.watched():
        trainer.fit(Normalized(kind == "manual"), loader)
    return dict(syncs.found), syncs.num_elsewhere


def syncs_on_rank(label: str) -> dict[str, tuple[dict[str, int], int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "can_be_read_at_once", lambda value: False)  # as on a GPU
        return {kind: syncs_of(label, kind, {"devices": 2}) for kind in OPTIONS}


@pytest.mark.parametrize("label", LABELS)
def test_no_step_waits_for_the_device(on_ranks, label: str) -> None:
    for counts in on_ranks(2, syncs_on_rank, label):
        for kind, (found, num_elsewhere) in counts.items():
            assert found.keys() <= ON_THE_HOST, kind
            assert num_elsewhere, (
                "torch's optimizers read their step counter: if no such read is found, the counter does not work"
            )


def test_no_step_of_paral_dp_waits_for_the_devices() -> None:
    for kind in ("automatic", "bf16"):
        assert not syncs_of("paral_dp", kind, {"devices": 2})[0], kind


def test_reads_are_counted() -> None:
    syncs = HostSyncs()
    with syncs.watched():
        syncs.is_counting = True
        logged = results.SharedResults(results.LoggedHistory(ParallelDims()), training=True)
        logged.history.differs = torch.tensor(False)
        logged.metrics(on_step=False)
        found = torch.tensor([1.0, 0.0])
        assert (float(found[0]), bool(found.any()), found.to("cpu").tolist(), found.numpy().sum()) == (1, 1, [1, 0], 1)

    assert syncs.found == {"data/results.py: metrics: __bool__": 1}
    assert syncs.num_elsewhere == 5
    assert not {"item", "to", "__bool__"} & vars(Tensor).keys()
