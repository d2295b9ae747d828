"""Replace the strategy of a Trainer while a run begins."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from lightning_paral.compat.private_name import PrivateName

_SEEN = "lightning 2.6.1 to 2.6.6"
_CONNECTOR = "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector"
NAMES = (
    PrivateName(
        name=f"{_CONNECTOR}._lazy_init_strategy",
        purpose="to give a strategy that is chosen during a run the devices, the environment and the plugins",
        reason="Trainer.strategy has no setter",
        seen=_SEEN,
        parameters=("self",),
    ),
    PrivateName(
        name=f"{_CONNECTOR}._check_and_init_precision",
        purpose="to create the precision plugin that fits the chosen strategy",
        reason="the Trainer creates it only in its constructor",
        seen=_SEEN,
        parameters=("self",),
    ),
    PrivateName(
        name="lightning.pytorch.Trainer._accelerator_connector",
        on_instances=True,
        purpose="to reach the object that holds the strategy",
        reason="Trainer.strategy has no setter",
        seen=_SEEN,
    ),
    PrivateName(
        name="lightning.pytorch.loops.fit_loop._FitLoop._data_source",
        on_instances=True,
        purpose="to read the first training batch before the run sets up its loaders",
        reason="Trainer.train_dataloader is None until then",
        seen=_SEEN,
    ),
)


def replace_strategy(trainer: Trainer, strategy: Strategy) -> None:
    """Make `strategy` that of the Trainer, with the Trainer's devices, cluster environment, precision and plugins."""
    connector: Any = trainer._accelerator_connector
    connector.strategy = strategy
    connector.precision_plugin = connector._check_and_init_precision()
    connector._lazy_init_strategy()


def training_loaders(trainer: Trainer) -> Any:
    """Return the training loaders as the user's hook returns them, or as they were given to `Trainer.fit`."""
    return trainer.fit_loop._data_source.dataloader()
