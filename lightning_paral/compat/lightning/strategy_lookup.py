"""Check the `strategy` argument of a Trainer or Fabric before Lightning looks it up in the registry.

With this check, a misspelled `paral_*` name raises a better error than "You selected an invalid strategy name". The
registry itself, which other code may query, is not changed.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning_paral.compat.private_name import PrivateName

NAMES = tuple(
    PrivateName(
        name=f"lightning.{connector}._check_config_and_set_final_flags",
        purpose="to explain misspelled names of strategies before Lightning rejects them",
        reason="no public hook runs between Trainer(strategy=...) or Fabric(strategy=...) and the lookup of the name",
        seen="lightning 2.6.1 to 2.6.6",
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
"""The class that looks up strategies, by module."""
_OURS = "lightning_paral_check"


def check_before_lookup(module: Any, check: Callable[[Any], None]) -> None:
    """Call `check` with each strategy argument, as the user gave it, before it is looked up.

    A second call replaces the check.

    Args:
        module: one of the modules in `CONNECTORS`.
        check: the function to call, which may raise.

    Raises:
        AttributeError: this version of Lightning looks up strategies in a different way.
    """
    connector = getattr(module, CONNECTORS[module.__name__])
    current = connector._check_config_and_set_final_flags
    is_ours = getattr(current, _OURS, None) is current  # a wrapper by other code may have copied our attributes
    plain = current.__wrapped__ if is_ours else current

    @wraps(plain)
    def check_first(self: Any, strategy: Any, *args: Any, **kwargs: Any) -> Any:
        check(strategy)
        return plain(self, strategy, *args, **kwargs)

    setattr(check_first, _OURS, check_first)
    connector._check_config_and_set_final_flags = check_first
