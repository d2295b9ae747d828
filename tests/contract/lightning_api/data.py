"""Rows for LightningDataModule, data hooks, and loaders of every kind."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.contract.lightning_api.rows import ALL, LIGHT, row
from tests.contract.tables.run import Run, Saving, plain
from tests.contract.user_code.models import Every, Share, Supervised, loader, samples, validated


class Data(LightningDataModule):
    """Loaders of this rank's share, and a note of every hook."""

    def __init__(self, run: Run, num_batches: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="run")
        self.run_here = run
        self.called: list[Any] = []
        self.drawn = 0

    def prepare_data(self) -> None:
        self.called.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.called.append(("setup", stage))

    def teardown(self, stage: str) -> None:
        self.called.append(("teardown", stage))

    def train_dataloader(self) -> Any:
        self.called.append("train_dataloader")
        return self.share(*samples(self.hparams.num_batches, 7))

    def share(self, *tensors: torch.Tensor) -> Any:
        dataset, num_ranks = TensorDataset(*tensors), self.run_here.num_ranks
        # By keyword: Lightning creates the loader again for prediction, and cannot map positional arguments.
        return DataLoader(dataset, batch_size=12 // num_ranks, sampler=Share(dataset, num_ranks, self.run_here.rank))

    def val_dataloader(self) -> Any:
        self.called.append("val_dataloader")
        return self.share(*samples(2, 8))

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [each * 1.5 for each in batch]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [each.to(device) for each in batch]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [each + 0.5 for each in batch]

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.trainer.global_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.called.append(("load_state_dict", state["drawn"]))


@row(
    "LightningDataModule: `prepare_data`, `setup`, loaders, `teardown`, transfer hooks, every stage",
    covers=("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
)
def datamodule(run: Run) -> dict[str, Any]:
    data, module = Data(run), run.module(Every)
    found = run.fit(module, loaders=None, how={"datamodule": data})
    trainer = run.trainer()
    logged = [trainer.validate(module, datamodule=data), trainer.test(module, datamodule=data)]
    trainer.predict(module, datamodule=data)
    return found | {"called": [each for each in data.called if each != "prepare_data"], "logged": logged}


@row("LightningDataModule: `state_dict`, `load_state_dict`, hyper-parameters, over a resume")
def data_state(run: Run) -> dict[str, Any]:
    run.fit(Every, loaders=None, how={"datamodule": Data(run)}, callbacks=[Saving(run, "x.ckpt")])
    data = Data(run)
    how = {"datamodule": data, "ckpt_path": run.folder / "x.ckpt"}
    found = run.fit(Every, loaders=None, how=how, max_epochs=2)
    loaded = Data.load_from_checkpoint(run.folder / "x.ckpt", run=run)
    called = [each for each in data.called if each != "prepare_data"]  # on rank 0 only
    return found | {"called": called, "loaded": dict(loaded.hparams)}


@row("`prepare_data_per_node=False`", columns=LIGHT, reference="ddp")
def per_node(run: Run) -> dict[str, Any]:
    class Once(Data):
        def __init__(self, run: Run) -> None:
            super().__init__(run)
            self.prepare_data_per_node = False

    data = Once(run)
    run.fit(Every, loaders=None, how={"datamodule": data})
    return {"called": data.called}


@row("`LightningDataModule.from_datasets`", columns=LIGHT, reference="ddp")
def from_datasets(run: Run) -> dict[str, Any]:
    data = LightningDataModule.from_datasets(TensorDataset(*samples(4, 7)), TensorDataset(*samples(1, 8)), batch_size=6)
    module = run.module(Every)
    run.last = run.trainer(limit_train_batches=0)
    torch.manual_seed(1)
    logged = run.trainer().validate(module, datamodule=data)
    return {"logged": logged}


@row("data hooks of the LightningModule")
def module_hooks(run: Run) -> dict[str, Any]:
    class Transferring(Supervised):
        def prepare_data(self) -> None:
            self.seen.append("prepare_data")

        def train_dataloader(self) -> Any:
            return run.data()["train_dataloaders"]

        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [each * 1.5 for each in batch]

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [each + 0.5 for each in batch]

    found = run.fit(Transferring, loaders=None)
    return {"losses": found["losses"], "weights": found["weights"]}


def combined(mode: str) -> Any:
    class Both(Supervised):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            parts = batch.values() if isinstance(batch, dict) else [batch]
            return torch.stack([self.loss(each) for each in parts if each is not None]).sum()

    def loaders(rank: int, num_ranks: int) -> dict[str, Any]:
        parts = {
            name: loader(*samples(count, count), rank=rank, num_ranks=num_ranks) for name, count in (("a", 4), ("b", 2))
        }
        return {"train_dataloaders": CombinedLoader(parts, mode)}

    return lambda run: run.fit(Both, loaders=loaders)


for mode in ("max_size_cycle", "min_size", "max_size"):
    row(f'`CombinedLoader(..., "{mode}")`', columns=LIGHT)(combined(mode))


@row("several loaders to validate, `add_dataloader_idx`", columns=LIGHT)
def several(run: Run) -> dict[str, Any]:
    class Several(Supervised):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", self.loss(batch), sync_dist=True)
            self.log(f"own_{dataloader_idx}", self.loss(batch), sync_dist=True, add_dataloader_idx=False)

    def loaders(rank: int, num_ranks: int) -> dict[str, Any]:
        parts = [loader(*samples(count, 20 + count), rank=rank, num_ranks=num_ranks) for count in (1, 3)]
        return validated(rank, num_ranks) | {"val_dataloaders": parts}

    return run.fit(Several, loaders=loaders)


class Stream(IterableDataset[Any]):
    def __init__(self, num_batches: int) -> None:
        self.tensors = samples(num_batches, 7)

    def __iter__(self) -> Any:
        return iter(list(zip(*self.tensors, strict=True)))


@row("an `IterableDataset` to train on and to validate on")
def stream(run: Run) -> dict[str, Any]:
    class Counting(Every):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("sum", batch[0].sum(), reduce_fx="sum", sync_dist=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("trained", batch[0].sum(), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
            return self.loss(batch)

    def loaders(rank: int, num_ranks: int) -> dict[str, Any]:
        size = 12 // num_ranks
        return {"train_dataloaders": DataLoader(Stream(4), size), "val_dataloaders": DataLoader(Stream(2), size)}

    found = run.fit(Counting, loaders=loaders)
    return {"metrics": found["metrics"], "steps": found["steps"]}


class Batches:
    """An iterable of batches that is not a DataLoader."""

    def __iter__(self) -> Any:
        return iter([samples(1, 7), samples(1, 8)])

    def __len__(self) -> int:
        return 2


@row("`devices=1`: an `IterableDataset` to train on and to evaluate on", columns=ALL, num_ranks=1)
def stream_of_one(run: Run) -> dict[str, Any]:
    def loaders(rank: int, num_ranks: int) -> dict[str, Any]:
        return {"train_dataloaders": DataLoader(Stream(4), 12), "val_dataloaders": DataLoader(Stream(2), 12)}

    module = run.module(Every)
    found = run.fit(module, loaders=loaders)
    loader, trainer = DataLoader(Stream(2), 7), run.trainer()
    logged = trainer.test(module, loader)
    return found | {"logged": logged, "predicted": plain(trainer.predict(module, loader))}


@row("an iterable of batches in place of a DataLoader", reference="ddp")
def batches(run: Run) -> dict[str, Any]:
    return run.fit(loaders=lambda rank, num_ranks: {"train_dataloaders": Batches()})


@row("`trainer.train_dataloader`, `val_dataloaders` after `fit`", columns=LIGHT)
def kept(run: Run) -> dict[str, Any]:
    run.fit(loaders=validated)
    first = next(iter(run.last.val_dataloaders))
    return {"lengths": (len(run.last.train_dataloader), len(run.last.val_dataloaders)), "parts": len(plain(first))}
