"""Parameters that several layers share."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch.nn import Module

from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.engines.tensor.planner.candidates import Layer


@dataclass(frozen=True, kw_only=True)
class Tie:
    """Modules that share a parameter."""

    layers: tuple[str, ...]
    """The names of the layers among them."""
    others: tuple[str, ...]
    """The names of other parameters that are the same tensor."""
    is_weight: bool
    """Whether all of them share their weight, not a bias."""

    def allows_vocab(self, layers: Mapping[str, Layer]) -> bool:
        """Return whether all owners can have the same rows."""
        same = len({layers[name].num_outputs for name in self.layers}) == 1
        return (
            self.is_weight and not self.others and same and not any(layers[name].is_transposed for name in self.layers)
        )


def find_ties(module: Module, layers: Mapping[str, Layer]) -> list[Tie]:
    """Return the shared parameters of which a layer is an owner."""
    owners: dict[int, list[tuple[str, str]]] = {}
    for name, part in module.named_modules():
        for attribute, parameter in own_parameters(part).items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((name, attribute))
    ties = []
    for found in owners.values():
        names = tuple(name for name, _ in found if name in layers)
        if len(found) > 1 and names:
            ties.append(
                Tie(
                    layers=names,
                    others=tuple(f"{name}.{attribute}".lstrip(".") for name, attribute in found if name not in layers),
                    is_weight=all(attribute == "weight" for _, attribute in found),
                )
            )
    return ties
