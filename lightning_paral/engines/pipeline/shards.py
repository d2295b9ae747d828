"""The interface to shards of the parameters of a stage, which ranks hold that draw different samples."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from torch.nn import Module, Parameter


class Shards(Protocol):
    """Shards the parameters of a stage between steps. Collectives are those of the ranks that hold its shards."""

    def shard(self, module: Module, parts: Sequence[Module]) -> None:
        """Shard the parameters of `parts` as one unit: `module`, and those of its submodules that belong to it."""

    def finish(self) -> None:
        """Prepare steps, after the units of the stage and then the root are sharded."""

    def unsharded(self) -> AbstractContextManager[None]:
        """Return a context in which the module has ordinary parameters, with full values. *Collective*."""

    def take_gradients(self) -> list[tuple[Parameter, Tensor]]:
        """Remove and return the full gradients of the unsharded parameters, each with the shard that it belongs to."""

    def scatter(self, gradients: list[tuple[Parameter, Tensor]]) -> None:
        """Add the means of full gradients to those of the shards, and empty the list. *Collective*."""

    def restore(self, obstacle: str | None) -> dict[Parameter, Parameter]:
        """Return the modules' own parameters by shard, with full values on the CPU. *Collective* unless `obstacle`."""
