"""Replace the strategy of a Trainer while a run begins."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector": {
        "_lazy_init_strategy": "give a strategy that is chosen late its devices and plugins",
        "_check_and_init_precision": "create the precision plugin that fits the chosen strategy",
    },
    "lightning.pytorch.Trainer": {"._accelerator_connector": "reach the object that holds the strategy"},
    "lightning.pytorch.loops.fit_loop._FitLoop": {
        "._data_source": "read the first training batch before the run sets up its loaders",
    },
}


def replace_strategy(trainer: Trainer, strategy: Strategy) -> None:
    """Make `strategy` that of the Trainer, with the Trainer's devices, cluster environment, precision and plugins."""
    connector: Any = trainer._accelerator_connector
    connector.strategy = strategy
    connector.precision_plugin = connector._check_and_init_precision()
    connector._lazy_init_strategy()


def training_loaders(trainer: Trainer) -> Any:
    """Return the training loaders as the user's hook returns them, or as they were given to `Trainer.fit`."""
    return trainer.fit_loop._data_source.dataloader()
