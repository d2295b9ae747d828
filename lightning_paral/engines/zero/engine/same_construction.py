"""Compare the parameters that the ranks create while a module is built partitioned.

DeepSpeed calls a collective for each of them, in which ranks that create different parameters would wait or fail.
"""

from collections.abc import Mapping
from datetime import timedelta

from torch.nn import Module, Parameter

from lightning_paral.distributed.store_exchange import SequenceOfRankZero
from lightning_paral.errors import ConfigurationError


class SameConstruction:
    """Compares what this rank does in `configure_model` with what rank 0 does, before the collectives of it.

    Args:
        timeout: how long to wait for rank 0.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._sequence = SequenceOfRankZero("construction", timeout)
        self._names: dict[Parameter, str] = {}

    def expect_module(self, module: Module) -> None:
        """Let messages name the parameters of `module`, which was just created, by its class."""
        own = module.named_parameters(recurse=False)
        self._names = {parameter: f"`{name}` of a {type(module).__name__}" for name, parameter in own}

    def expect_named(self, parameters: Mapping[str, Parameter]) -> None:
        """Let messages name `parameters` by these names."""
        self._names = {parameter: f"`{name}`" for name, parameter in parameters.items()}

    def check_parameter(self, parameter: Parameter) -> None:
        """Check that rank 0 creates the same parameter next.

        Raises:
            ConfigurationError: it does not.
        """
        name = self._names.get(parameter, "a parameter")
        self._check(f"{name} with shape {tuple(parameter.shape)} and dtype {parameter.dtype}", "creates")

    def check_use(self, parameters: list[Parameter]) -> None:
        """Check that rank 0 uses as many parameters next, which are gathered for it.

        Raises:
            ConfigurationError: it does not.
        """
        self._check(f"{len(parameters)} of the parameters that were created before", "uses")

    def check_end(self) -> None:
        """Check that rank 0 creates no further parameter either, in `configure_model` or after it.

        Raises:
            ConfigurationError: it does not.
        """
        self._names = {}
        self._check("no further parameter", "creates")

    def _check(self, what: str, verb: str) -> None:
        own = f"{verb} {what}"
        of_rank_zero = self._sequence.next(own)
        if own != of_rank_zero:
            raise ConfigurationError(
                f"The ranks build different modules in configure_model: rank {self._sequence.rank} {own}, where rank 0 "
                f"{of_rank_zero}. All ranks train the same module. Create it in the same way on all ranks: not from "
                "data, files or environment variables that differ between them."
            )
