"""Optimizers have to hold what is trained: the shards."""

from collections.abc import Iterable

from torch.nn import Module, Parameter
from torch.optim import Optimizer

from lightning_paral.errors import ConfigurationError
from lightning_paral.fsdp.shard import ShardedModule


def check_optimizers(optimizers: Iterable[Optimizer], module: Module, sharded: ShardedModule) -> None:
    """Raise a `ConfigurationError` if an optimizer was made before `module` was sharded, or cannot update all of it."""
    current = set(module.parameters())
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        lost = [name for name, parameter in sharded.original_parameters() if parameter in set(held) - current]
        if lost:
            raise ConfigurationError(
                f"{type(optimizer).__name__} was made before {type(module).__name__} was sharded: it holds "
                f"{', '.join(lost[:3])}{' and others' if len(lost) > 3 else ''}, which are not trained any more. Make "
                "it inside `configure_optimizers`, from `self.parameters()`."
            )
        _check_one_call(optimizer, held, sharded.replicated)


def _check_one_call(optimizer: Optimizer, held: list[Parameter], replicated: list[Parameter]) -> None:
    together = [option for option in ("foreach", "fused") if optimizer.defaults.get(option)]
    whole = set(replicated) & set(held)
    if together and whole and len(held) > len(whole):
        raise ConfigurationError(
            f"{type(optimizer).__name__}({together[0]}=True) would update shards and the {len(whole)} 0-dimensional "
            "or empty parameter(s), which are not sharded, in one call; torch cannot. Leave the option out, or give "
            "the parameters that have `dim() == 0` the shape [1]."
        )
