"""The layers that are split: their parameters, and how each rank computes its part of a layer."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import Embedding, Module, Parameter

from lightning_paral.comm.reduce_scatter import gather_rows, sum_to_rows
from lightning_paral.compat.torch.autograd import version_of
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.distributed.rng_state import derive_seed, seed_torch, set_torch_states, torch_states
from lightning_paral.engines.tensor.collectives import Layout, copy_to_ranks, exchange_rows, own_range, sum_over_ranks
from lightning_paral.engines.tensor.plan import TensorPlan, split_dims
from lightning_paral.engines.tensor.shapes import is_conv1d
from lightning_paral.engines.tensor.split_tensor import SplitTensor
from lightning_paral.engines.tensor.vocabulary import local_padding_idx, own_rows_of_ids, rows_of_ids
from lightning_paral.errors import ConfigurationError


class SharedCopies:
    """Gives layers that have the same input one copy of it, so that one collective sums their gradients."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._num_ranks = group, dist.get_world_size(group)
        self._last: tuple[ref[Tensor], float, Tensor] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return all of `tensor`, split or not, or what the last call has returned for the same tensor.

        The gradients of the result are summed over the ranks.
        """
        needs_graph = torch.is_grad_enabled() and tensor.requires_grad
        split = tensor if isinstance(tensor, SplitTensor) else None
        if split is None and not needs_graph:
            return tensor
        version = version_of(tensor) if split is None else split.local_version()
        if self._last is not None:
            source, known, copy = self._last
            if source() is tensor and known == version:
                return copy
        if split is not None and split.parts.dim < split.ndim - 1 and split.parts.is_one_run(self._num_ranks):
            local = split.local.movedim(split.parts.dim, 0)
            copied = gather_rows(local, self._group).movedim(0, split.parts.dim).contiguous()
        else:
            full = tensor if split is None else split.full()
            copied = copy_to_ranks(full, self._group) if needs_graph else full
        if torch.is_grad_enabled():
            self._last = ref(tensor, self._forget), version, copied
        return copied

    def _forget(self, source: Any) -> None:
        if self._last is not None and self._last[0] is source:
            self._last = None


class SplitLayer(ABC):
    """Computes this rank's part of a layer: hooks around `forward` give the layer its local parameters.

    While `forward` runs, attributes of the instance hide the parameters, which are DTensors. The layer's own code
    therefore computes with ordinary tensors.

    Args:
        layer: the layer.
        style: how it is split.
        run: what the layers share.
    """

    def __init__(self, layer: Module, style: str, run: "TensorSplit") -> None:
        self.layer = layer
        self.group = run.group
        self.run = run
        self._dims = split_dims(layer, style)
        weight = own_parameters(layer)["weight"]
        assert weight is not None
        self.size = weight.shape[self._dims["weight"]]
        """The full number of the output features, input features or rows that are split."""
        self._hidden: dict[str, Any] = {}
        """The values of attributes that are hidden; `self` for those that the instance does not have."""
        layer.register_forward_pre_hook(self._before, with_kwargs=True)
        # First, so that the user's own hooks see the output of the whole layer.
        layer.register_forward_hook(self._after, prepend=True, always_call=True)

    def _before(self, layer: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self.run.is_paused:
            return args, kwargs
        for name, parameter in own_parameters(layer).items():
            if isinstance(parameter, DTensor):
                self.hide(name, parameter.to_local())
            elif parameter is not None and name in self._dims:
                raise ConfigurationError(
                    f"The {name} of a layer that is split over the tensor ranks was replaced, as by "
                    "torch.func.functional_call. Give a plan without this layer, plan={...}, or train with paral_fsdp."
                )
        if args:
            return (self.prepare(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, {**kwargs, name: self.prepare(kwargs[name])}

    def _after(self, layer: Module, args: Any, output: Any) -> Any:
        if self.run.is_paused:
            return output
        for name, value in self._hidden.items():
            if value is self:
                vars(layer).pop(name, None)
            else:
                vars(layer)[name] = value
        self._hidden.clear()
        return self.finish(output) if isinstance(output, Tensor) else output

    def hide(self, name: str, value: Any) -> None:
        """Give the layer's attribute `name` another value until `forward` ends."""
        self._hidden.setdefault(name, vars(self.layer).get(name, self))
        vars(self.layer)[name] = value

    @abstractmethod
    def prepare(self, value: Tensor) -> Tensor:
        """Return the input with which the layer's own code computes this rank's part."""

    @abstractmethod
    def finish(self, output: Tensor) -> Tensor:
        """Return the output that the layer's caller gets, from the result of this rank's part."""


class ColwiseLayer(SplitLayer):
    """A linear layer of which this rank computes some of the output features."""

    def __init__(self, layer: Module, *others: Any) -> None:
        super().__init__(layer, *others)
        self.segments: tuple[int, ...] = (self.size,)
        """The segments of the output, of which each rank computes a part, as in `Layout`."""
        self._learned: tuple[int, ...] = self.segments

    def learn(self, cuts: Iterable[int]) -> None:
        """Note that code cuts the output at these features, as into queries, keys and values.

        From the next step on, each rank computes a part of each piece, if the ranks divide it.
        """
        ends = sorted({0, *accumulate(self._learned), *cuts})
        segments = tuple(stop - start for start, stop in pairwise(ends))
        if Layout(0, segments).is_even(dist.get_world_size(self.group)):
            self._learned = segments

    def begin_step(self) -> None:
        """Use the cuts that were learned: not within a step, since a backward pass may compute the layer again."""
        self.segments = self._learned

    def prepare(self, value: Tensor) -> Tensor:
        """Return the full input, whose gradients are summed over the ranks."""
        if len(self.segments) > 1:
            self._exchange_rows()
        if is_conv1d(self.layer):
            rows = own_range(self.size, self.group)
            self.hide("nf", rows.stop - rows.start)
        return self.run.copies.of(value)

    def finish(self, output: Tensor) -> Tensor:
        """Return the output, of which each rank has a part."""
        split = SplitTensor.of(output, Layout(output.ndim - 1, self.segments), self.group, self.run.own_draws)
        split.learn = self.learn
        return split

    def _exchange_rows(self) -> None:
        """Compute this rank's part of each segment, instead of consecutive output features."""
        for name, dim in self._dims.items():
            local = getattr(self.layer, name).transpose(0, dim)
            rows = exchange_rows(local.contiguous(), self.segments, self.group)
            self.hide(name, rows.transpose(0, dim))


class RowwiseLayer(SplitLayer):
    """A linear layer of which this rank multiplies some of the input features."""

    _bias: Tensor | None = None

    def prepare(self, value: Tensor) -> Tensor:
        """Return this rank's features of the input. The bias is added once, after the results are summed."""
        value = SplitTensor.own_part(value, Layout(value.ndim - 1, (self.size,)), self.group)
        self._bias = own_parameters(self.layer).get("bias")
        if self._bias is not None:
            self.hide("bias", torch.zeros_like(self._bias) if is_conv1d(self.layer) else None)
        return value

    def finish(self, output: Tensor) -> Tensor:
        """Return the sum of the ranks' results, with the bias; or the part of it with this rank's positions."""
        output, bias, self._bias = self._summed(output), self._bias, None
        return output if bias is None else output + bias.to(output.dtype)

    def _summed(self, output: Tensor) -> Tensor:
        parts = Layout(output.ndim - 2, (output.shape[-2],)) if output.ndim > 1 else None
        if not self.run.splits_positions or parts is None or not parts.is_even(dist.get_world_size(self.group)):
            return sum_over_ranks(output, self.group)
        own = sum_to_rows(output.movedim(parts.dim, 0), self.group).movedim(0, parts.dim).contiguous()
        return SplitTensor.of(own, parts, self.group, self.run.own_draws)


class EmbeddingLayer(SplitLayer):
    """An embedding of which this rank has some of the rows.

    A rank looks up row 0 in place of rows that other ranks have. The gradient of such a row is zero, but the row does
    count as used: embeddings with `max_norm` or `scale_grad_by_freq` must stay whole.
    """

    layer: Embedding
    _elsewhere: Tensor | None = None

    def prepare(self, value: Tensor) -> Tensor:
        """Return the indices among this rank's rows."""
        rows = own_range(self.size, self.group)
        self.hide("padding_idx", local_padding_idx(self.layer.padding_idx, rows))
        local, self._elsewhere = own_rows_of_ids(value, rows, self.size)
        return local

    def finish(self, output: Tensor) -> Tensor:
        """Return the rows of all ranks."""
        elsewhere, self._elsewhere = self._elsewhere, None
        assert elsewhere is not None
        return rows_of_ids(output, elsewhere, self.group)


class TensorSplit:
    """Replaces the parameters of a module by DTensors on the tensor ranks, and makes its layers compute with them.

    Parameters of layers that are split become `Shard`s. All others become replicas, so that all parameters are on the
    same mesh.

    Args:
        module: the module.
        plan: the layers that are split.
        mesh: the mesh of the tensor ranks, with one dimension.
        splits_positions: whether each rank has some of the positions of activations between chains.
    """

    def __init__(self, module: Any, plan: TensorPlan, mesh: DeviceMesh, *, splits_positions: bool = False) -> None:
        self.plan = plan
        self.splits_positions = splits_positions
        self.is_paused = False
        """Whether layers compute as if they were not split."""
        self._mesh = mesh
        self.group = mesh.get_group()
        self._split_by_parameter: dict[Parameter, Parameter] = {}
        self._layers = {module.get_submodule(name): style for name, style in plan.splits.items()}
        self._learning: list[ColwiseLayer] = []
        self.may_draw = any(_may_drop(part) for part in module.modules())
        """Whether steps may draw random numbers for activations."""
        self.copies = SharedCopies(self.group)

    def install(self) -> None:
        """Make the layers compute with this rank's part. Call it before FSDP registers its hooks.

        Raises:
            ConfigurationError: the activations of a layer are to be recomputed, which would happen without its hooks.
        """
        for name, (layer, style) in zip(self.plan.splits, self._layers.items(), strict=True):
            if "forward" in vars(layer):
                raise ConfigurationError(
                    f"activation_checkpointing chooses {name}, a layer that is split over the tensor ranks. "
                    "Choose modules that contain such layers: ActivationCheckpointing(units=['Block'])."
                )
            if isinstance(layer, Embedding):
                EmbeddingLayer(layer, style, self)
            elif style == "rowwise":
                RowwiseLayer(layer, style, self)
            else:
                self._learning.append(ColwiseLayer(layer, style, self))

    def begin_step(self) -> None:
        """Prepare the layers for a step."""
        for layer in self._learning:
            layer.begin_step()

    @contextmanager
    def own_draws(self) -> Iterator[None]:
        """Draw numbers of this rank inside the block, whose seed is drawn from the numbers that all ranks draw.

        Activations that every rank has in full need equal dropout masks on all ranks. Those of which each rank has a
        part need masks of their own. Recomputed activations get the same masks again.
        """
        seed = int(torch.randint(2**63 - 1, (), device="cpu"))
        shared = torch_states()
        seed_torch(derive_seed(seed, self._mesh.get_local_rank()))
        try:
            yield
        finally:
            set_torch_states(shared)

    def split(self, parts: Sequence[Module], whole: Iterable[Parameter]) -> None:
        """Replace the parameters of `parts` by DTensors, which hold this rank's part of those that are split.

        Args:
            parts: modules whose parameters have values, which are equal on all tensor ranks.
            whole: parameters that stay ordinary tensors.
        """
        kept, dims = set(whole), dict[Any, int]()
        for layer in self._layers.keys() & set(parts):
            own = own_parameters(layer)
            dims |= {own[name]: dim for name, dim in split_dims(layer, self._layers[layer]).items()}
        for part in parts:
            own = own_parameters(part)
            for name, parameter in own.items():
                if parameter is not None and parameter not in kept and not isinstance(parameter, DTensor):
                    own[name] = self._distributed(parameter, dims.get(parameter))

    def _distributed(self, parameter: Parameter, dim: int | None) -> Parameter:
        if parameter not in self._split_by_parameter:
            local = parameter.detach()
            placement: Placement = Replicate()
            if dim is not None:
                own = own_range(parameter.shape[dim], self.group)
                local = local.narrow(dim, own.start, own.stop - own.start).clone(memory_format=torch.contiguous_format)
                placement = Shard(dim)
            shape, stride = parameter.shape, parameter.stride()
            full = DTensor.from_local(local, self._mesh, [placement], run_check=False, shape=shape, stride=stride)
            self._split_by_parameter[parameter] = Parameter(full, parameter.requires_grad)
        return self._split_by_parameter[parameter]


def _may_drop(module: Module) -> bool:
    """Return whether `module` may use dropout: it is a dropout layer, or has a probability for one."""
    if "Dropout" in type(module).__name__ and getattr(module, "p", 0) > 0:
        return True
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items())
