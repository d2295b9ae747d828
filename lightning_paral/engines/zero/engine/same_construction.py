"""Compare the parameters that the ranks create while a module is built partitioned.

DeepSpeed calls a collective for each of them, in which ranks that create different parameters would wait or fail.
"""

from collections.abc import Mapping

from torch.nn import Module, Parameter

from lightning_paral.distributed.exchange import digest_of, gather_ints, gather_objects
from lightning_paral.errors import ConfigurationError


class SameConstruction:
    """Compares what the ranks do in `configure_model`, before the collectives of it. Its methods are *collective*."""

    def __init__(self) -> None:
        self._names: dict[Parameter, str] = {}

    def expect_module(self, module: Module) -> None:
        """Let messages name the parameters of `module`, which was just created, by its class."""
        own = module.named_parameters(recurse=False)
        self._names = {parameter: f"`{name}` of a {type(module).__name__}" for name, parameter in own}

    def expect_named(self, parameters: Mapping[str, Parameter]) -> None:
        """Let messages name `parameters` by these names."""
        self._names = {parameter: f"`{name}`" for name, parameter in parameters.items()}

    def check_parameter(self, parameter: Parameter) -> None:
        """Check that all ranks create the same parameter next.

        Raises:
            ConfigurationError: they do not.
        """
        name = self._names.get(parameter, "a parameter")
        self._check(f"{name} with shape {tuple(parameter.shape)} and dtype {parameter.dtype}", "creates")

    def check_use(self, parameters: list[Parameter]) -> None:
        """Check that all ranks use as many parameters next, which are gathered for it.

        Raises:
            ConfigurationError: they do not.
        """
        self._check(f"{len(parameters)} of the parameters that were created before", "uses")

    def check_end(self) -> None:
        """Check that no rank creates a further parameter, in `configure_model` or after it.

        Raises:
            ConfigurationError: one does.
        """
        self._names = {}
        self._check("no further parameter", "creates")

    def _check(self, what: str, verb: str) -> None:
        own = f"{verb} {what}"
        if len(set(gather_ints(digest_of(own)))) > 1:
            by_rank = gather_objects(own)
            rank = next(rank for rank, each in enumerate(by_rank) if each != by_rank[0])
            raise ConfigurationError(
                f"The ranks build different modules in configure_model: rank {rank} {by_rank[rank]}, where rank 0 "
                f"{by_rank[0]}. All ranks train the same module. Create it in the same way on all ranks: not from "
                "data, files or environment variables that differ between them."
            )
