"""The names that FSDP2 gives to its groups of parameters. Importing this module does not import FSDP."""

from typing import Any

from lightning_paral.compat.private_name import PrivateName

NAMES = (
    PrivateName(
        name="torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup._module_fqn",
        purpose="to name the unit for whose collective a rank waits",
        reason="no public name gives the module of a group of parameters: the class is private",
        seen="torch 2.11 to 2.13",
        on_instances=True,
    ),
)


def unit_name(group: Any) -> str | None:
    """Return the FQN of the unit that an `FSDPParamGroup` gathers, empty for the root; `None` for another object."""
    name: str | None = getattr(group, "_module_fqn", None)
    return name
