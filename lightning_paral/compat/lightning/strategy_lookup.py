"""Check the `strategy` argument of a Trainer before Lightning looks it up in the registry.

With this check, a misspelled `paral_*` name raises a better error than "You selected an invalid strategy name". The
registry itself, which other code may query, is not changed.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch.trainer.connectors import accelerator_connector

from lightning_paral.compat.private_name import Names

NAMES: Names = {
    "lightning.pytorch.trainer.connectors.accelerator_connector._AcceleratorConnector": {
        "_check_config_and_set_final_flags(strategy)": "explain misspelled names of strategies",
    },
}
_OURS = "lightning_paral_check"


def check_before_lookup(check: Callable[[Any], None]) -> None:
    """Call `check` with each strategy argument of a Trainer, as the user gave it, before it is looked up.

    A second call replaces the check.

    Args:
        check: the function to call, which may raise.

    Raises:
        AttributeError: this version of Lightning looks up strategies in a different way.
    """
    connector: Any = accelerator_connector._AcceleratorConnector
    current = connector._check_config_and_set_final_flags
    is_ours = getattr(current, _OURS, None) is current  # a wrapper by other code may have copied our attributes
    plain = current.__wrapped__ if is_ours else current

    @wraps(plain)
    def check_first(self: Any, strategy: Any, *args: Any, **kwargs: Any) -> Any:
        check(strategy)
        return plain(self, strategy, *args, **kwargs)

    setattr(check_first, _OURS, check_first)
    connector._check_config_and_set_final_flags = check_first
