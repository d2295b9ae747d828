"""Split the layers of a module over the tensor ranks, in place."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Module, Parameter

from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.engines.tensor.collectives import own_range
from lightning_paral.engines.tensor.layers import SharedCopies, SplitLayer, layer_class, split_dims
from lightning_paral.engines.tensor.plan import TensorPlan
from lightning_paral.engines.tensor.random_streams import SplitStreams
from lightning_paral.errors import ConfigurationError


class TensorSplit:
    """Replaces the parameters of a module by DTensors on the tensor ranks, and makes its layers compute with them.

    Parameters of layers that are split become `Shard`s. All others become replicas, so that all parameters are on the
    same mesh.

    Args:
        module: the module.
        plan: the layers that are split.
        mesh: the mesh of the tensor ranks, with one dimension.
        device: the device of this rank.
        splits_positions: whether each rank has some of the positions of activations between chains.
    """

    def __init__(
        self,
        module: Any,
        plan: TensorPlan,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        splits_positions: bool = False,
    ) -> None:
        self.plan = plan
        self.splits_positions = splits_positions
        self.is_paused = False
        """Whether layers compute as if they were not split."""
        self._mesh = mesh
        self.group = mesh.get_group()
        self._split_by_parameter: dict[Parameter, Parameter] = {}
        layers = dict(module.named_modules())
        self._layers = {layers[name]: style for name, style in plan.splits.items()}
        self._installed: list[SplitLayer] = []
        self.may_draw = any(_may_drop(part) for part in module.modules())
        """Whether steps may draw random numbers for activations."""
        self.streams = SplitStreams(mesh.get_local_rank())
        self.copies = SharedCopies(self.group)

    def install(self) -> None:
        """Make the layers compute with this rank's part. Call it before FSDP registers its hooks.

        Raises:
            ConfigurationError: the activations of a layer are to be recomputed, which would happen without its hooks.
        """
        names = dict(zip(self._layers, self.plan.splits, strict=True))
        for layer, style in self._layers.items():
            if "forward" in vars(layer):
                raise ConfigurationError(
                    f"activation_checkpointing chooses {names[layer]}, a layer that is split over the tensor ranks. "
                    "Choose modules that contain such layers: ActivationCheckpointing(units=['Block'])."
                )
            self._installed.append(layer_class(layer, style)(layer, style, self))

    def begin_step(self) -> None:
        """Prepare the layers for a step."""
        for layer in self._installed:
            layer.begin_step()

    def split(self, parts: Sequence[Module], whole: Iterable[Parameter]) -> None:
        """Replace the parameters of `parts` by DTensors, which hold this rank's part of those that are split.

        Args:
            parts: modules whose parameters have values, which are equal on all tensor ranks.
            whole: parameters that stay ordinary tensors.
        """
        kept, dims = set(whole), self._dims(parts)
        for part in parts:
            own = own_parameters(part)
            for name, parameter in own.items():
                if parameter is not None and parameter not in kept and not isinstance(parameter, DTensor):
                    own[name] = self._distributed(parameter, dims.get(parameter))

    def _dims(self, parts: Sequence[Module]) -> dict[Any, int]:
        """Return the dimension in which each parameter of `parts` is split. A tied parameter belongs to several."""
        found: dict[Any, int] = {}
        for layer in parts:
            if layer in self._layers:
                own = own_parameters(layer)
                found.update({own[name]: dim for name, dim in split_dims(layer, self._layers[layer]).items()})
        return found

    def _distributed(self, parameter: Parameter, dim: int | None) -> Parameter:
        if parameter not in self._split_by_parameter:
            local, placement = parameter.detach(), Replicate()
            if dim is not None:
                own = own_range(parameter.shape[dim], self.group)
                local = local.narrow(dim, own.start, own.stop - own.start).clone(memory_format=torch.contiguous_format)
                placement = Shard(dim)  # type: ignore[assignment]
            full = DTensor.from_local(
                local,
                self._mesh,
                [placement],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            self._split_by_parameter[parameter] = Parameter(full, parameter.requires_grad)
        return self._split_by_parameter[parameter]


def _may_drop(module: Module) -> bool:
    """Return whether `module` may use dropout: it is a dropout layer, or has a probability for one."""
    if "Dropout" in type(module).__name__ and getattr(module, "p", 0) > 0:
        return True
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())
