"""What a user says about the machine: values as text, and files of measurements."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_paral.errors import ConfigurationError
from lightning_paral.planning.following import FollowedSteps
from lightning_paral.planning.time.machine import Machine
from lightning_paral.planning.time.measured import read_measured
from lightning_paral.quantities import parse_bandwidth, parse_flops, parse_seconds

_PARSERS: dict[str, Callable[[Any, str], float]] = {
    "link": parse_bandwidth,
    "flops": parse_flops,
    "latency": parse_seconds,
    "local_link": parse_bandwidth,
    "optimizer_bandwidth": parse_bandwidth,
    "copy_bandwidth": parse_bandwidth,
}


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The fields of `Machine`, as numbers or as text, such as `"400Gbit"`, `"790T"` and `"20us"`. `None`: not given.

    Raises:
        ConfigurationError: a value cannot be parsed, or only one of `link` and `flops` is known.
    """

    link: str | float | None = None
    flops: str | float | None = None
    latency: str | float | None = None
    local_link: str | float | None = None
    ranks_per_node: int | None = None
    optimizer_bandwidth: str | float | None = None
    copy_bandwidth: str | float | None = None
    measured: tuple[str, ...] = ()
    """Files that `paral bench ... --json` has written. Given values come before measured ones."""
    are_cli_options: bool = False
    """Whether errors name options of the command line."""

    def __post_init__(self) -> None:
        given = self._given()
        if given and not self.measured:
            self._check(given)

    def machine(self, followed: FollowedSteps, module_name: str) -> Machine | None:
        """Return the machine, or `None` if nothing about it is given.

        Args:
            followed: the step of the planned module, for which FLOP/s were measured.
            module_name: the name of its class.

        Raises:
            ConfigurationError: a file does not have the figures, or something is missing.
        """
        values = {**read_measured(self.measured, followed, module_name), **self._given()}
        if not values:
            return None
        self._check(values)
        return Machine(**values)

    def _given(self) -> dict[str, Any]:
        given: dict[str, Any] = {
            name: parse(getattr(self, name), self._name(name))
            for name, parse in _PARSERS.items()
            if getattr(self, name) is not None
        }
        return given if self.ranks_per_node is None else given | {"ranks_per_node": self.ranks_per_node}

    def _check(self, values: dict[str, Any]) -> None:
        for field, example in (("link", "400Gbit"), ("flops", "400T")):
            if field not in values:
                raise ConfigurationError(
                    f"The time of a step depends on {self._name('link')} and {self._name('flops')}, but "
                    f"{self._name(field)} is not known. Give it, for example {example}, or measure it with `paral "
                    f"bench` and give the file to {self._name('measured')}."
                )

    def _name(self, field: str) -> str:
        return "--" + field.replace("_", "-") if self.are_cli_options else field
