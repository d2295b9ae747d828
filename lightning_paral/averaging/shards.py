"""What averages need of a strategy: this rank's shards of the weights, and a way to put new values to use."""

from typing import Protocol

from torch import Tensor


class WeightShards(Protocol):
    """What this rank holds of each parameter of a module, in the order of `module.parameters()`.

    An average of a parameter has the shape of what is held of it, and may be on another device.
    """

    def prepare(self) -> None:
        """Bring what was written to parameters into the shards. Called before shards are written."""

    def current(self) -> list[Tensor]:
        """Return the shards, as plain tensors over the memory that they are in. Nothing is sent."""

    def publish(self, *, borrowed: bool) -> None:
        """Let the module compute with the current values of the shards. *Collective* over the world.

        Args:
            borrowed: whether the shards hold averages for an evaluation: master copies stay as they are, and so do the
                weights that training goes on with.
        """

    def keep(self) -> None:
        """Make the current values of the shards the weights of the module, in the master copies, too."""

    def as_saved(self, number: int, average: Tensor) -> Tensor:
        """Return the average of a parameter for a checkpoint: a tensor of true shape of which this rank has a part."""

    def read(self, number: int, stored: Tensor, average: Tensor) -> None:
        """Fill the average of a parameter with what `stored`, of true shape, holds of it."""

    def has_master(self, number: int) -> bool:
        """Whether a checkpoint holds a master copy of a parameter, and not the shard."""
