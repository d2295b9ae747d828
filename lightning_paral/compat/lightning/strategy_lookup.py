"""Look at what a Trainer or Fabric is given as `strategy` before Lightning looks it up among the registered names.

So a misspelled name of ours gets a better answer than "You selected an invalid strategy name", and the registry with
its list of names, which anybody may ask, stays as Lightning made it.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning_paral.compat.private_name import PrivateName

NAMES = tuple(
    PrivateName(
        name=f"lightning.{connector}._check_config_and_set_final_flags",
        purpose="to explain misspelled names of strategies before Lightning refuses them",
        reason="nothing public runs between Trainer(strategy=...) or Fabric(strategy=...) and the lookup of the name",
        seen="Lightning 2.6.1 to 2.6.6",
        parameters=("strategy",),
    )
    for connector in (
        "pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector",
        "fabric.connector._Connector",
    )
)
CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning_fabric.connector": "_Connector",
}
"""By module: the class that looks strategies up."""
_OURS = "lightning_paral_check"


def check_before_lookup(module: Any, check: Callable[[Any], None]) -> None:
    """Call `check` with each strategy that is about to be looked up, as the user gave it; it may raise.

    Doing it again replaces the check.

    Args:
        module: one of `CONNECTORS`, imported.
        check: what to call.

    Raises:
        AttributeError: this Lightning looks strategies up another way.
    """
    connector = getattr(module, CONNECTORS[module.__name__])
    current = connector._check_config_and_set_final_flags
    is_ours = getattr(current, _OURS, None) is current  # a wrapper of somebody else's copies attributes
    plain = current.__wrapped__ if is_ours else current

    @wraps(plain)
    def check_first(self: Any, strategy: Any, *args: Any, **kwargs: Any) -> Any:
        check(strategy)
        return plain(self, strategy, *args, **kwargs)

    setattr(check_first, _OURS, check_first)
    connector._check_config_and_set_final_flags = check_first
