"""The parameters of a layer that is split, and how each rank computes its part of the layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, Protocol
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Embedding, Module

from lightning_paral.comm.reduce_scatter import gather_rows, sum_to_rows
from lightning_paral.compat.torch.autograd import version_of
from lightning_paral.compat.torch.modules import own_parameters
from lightning_paral.engines.tensor.candidates import is_conv1d
from lightning_paral.engines.tensor.collectives import (
    copy_to_ranks,
    own_range,
    own_rows_of_segments,
    split_features,
    sum_over_ranks,
)
from lightning_paral.engines.tensor.layout import Layout, sizes_between
from lightning_paral.engines.tensor.random_streams import SplitStreams
from lightning_paral.engines.tensor.split_tensor import SplitTensor
from lightning_paral.errors import ConfigurationError

_ABSENT = object()
"""Stands for an attribute that an instance does not have."""


def split_dims(layer: Module, style: str | None) -> dict[str, int]:
    """Return the dimension in which each parameter of `layer` is split, by name. The others stay whole."""
    if style is None:
        return {}
    if isinstance(layer, Embedding):
        return {"weight": 0}
    features = 1 if style == "rowwise" else 0
    dims = {"weight": 1 - features if is_conv1d(layer) else features}
    if features == 0 and own_parameters(layer).get("bias") is not None:
        dims["bias"] = 0
    return dims


class SharedCopies:
    """Gives layers that have the same input one copy of it, so that one collective sums their gradients."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._last: tuple[ref[Tensor], float, Tensor] | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return all of `tensor`, split or not, or what the last call has returned for the same tensor.

        The gradients of the result are summed over the ranks.
        """
        is_split = isinstance(tensor, SplitTensor)
        if not is_split and not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        version = tensor.local_version() if isinstance(tensor, SplitTensor) else version_of(tensor)
        if self._last is not None:
            source, known, copy = self._last
            if source() is tensor and known == version:
                return copy
        copied = self._copied(tensor)
        if torch.is_grad_enabled():
            self._last = ref(tensor, self._forget), version, copied
        return copied

    def _copied(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, SplitTensor):
            dim, is_single = tensor.parts.dim, len(tensor.parts.segments) == 1
            if dim < tensor.ndim - 1 and is_single:  # positions
                return gather_rows(tensor.local.movedim(dim, 0), self._group).movedim(0, dim).contiguous()
            tensor = tensor.full()
        return copy_to_ranks(tensor, self._group) if torch.is_grad_enabled() and tensor.requires_grad else tensor

    def _forget(self, source: Any) -> None:
        if self._last is not None and self._last[0] is source:
            self._last = None


class TensorRun(Protocol):
    """What the layers of a module share in a run."""

    group: dist.ProcessGroup
    """The ranks that compute each layer together."""
    copies: SharedCopies
    streams: SplitStreams
    is_paused: bool
    """Whether layers compute as if they were not split."""
    splits_positions: bool
    """Whether each rank has some of the positions of activations that it would otherwise have in full."""


class SplitLayer(ABC):
    """Computes this rank's part of a layer: hooks around `forward` give the layer its local parameters.

    While `forward` runs, attributes of the instance hide the parameters, which are DTensors. The layer's own code
    therefore computes with ordinary tensors.

    Args:
        layer: the layer.
        style: how it is split.
        run: what the layers share.
    """

    def __init__(self, layer: Module, style: str, run: TensorRun) -> None:
        self.layer = layer
        self.group = run.group
        self.run = run
        self._dims = split_dims(layer, style)
        self._hidden: dict[str, Any] = {}
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
            if value is _ABSENT:
                vars(layer).pop(name, None)
            else:
                vars(layer)[name] = value
        self._hidden.clear()
        return self.finish(output) if isinstance(output, Tensor) else output

    def hide(self, name: str, value: Any) -> None:
        """Give the layer's attribute `name` another value until `forward` ends."""
        self._hidden.setdefault(name, vars(self.layer).get(name, _ABSENT))
        vars(self.layer)[name] = value

    def begin_step(self) -> None:  # noqa: B027  # most layers need nothing
        """Prepare for a step."""

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
        self.num_features = _num_features(layer, 0)
        self.segments: tuple[int, ...] = (self.num_features,)
        """The segments of the output, of which each rank computes a part, as in `Layout`."""
        self._learned: tuple[int, ...] = self.segments

    def learn(self, cuts: Iterable[int]) -> None:
        """Note that code cuts the output at these features, as into queries, keys and values.

        From the next step on, each rank computes a part of each piece, if the ranks divide it.
        """
        segments = sizes_between({*accumulate(self._learned), *cuts}, self.num_features)
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
            rows = own_range(self.num_features, self.group)
            self.hide("nf", rows.stop - rows.start)
        return self.run.copies.of(value)

    def finish(self, output: Tensor) -> Tensor:
        """Return the output, of which each rank has a part."""
        split = SplitTensor.of(output, Layout(output.ndim - 1, self.segments), self.group, self.run.streams)
        split.learn = self.learn
        return split

    def _exchange_rows(self) -> None:
        """Compute this rank's part of each segment, instead of consecutive output features."""
        for name, dim in self._dims.items():
            local = getattr(self.layer, name).transpose(0, dim)
            rows = own_rows_of_segments(local.contiguous(), self.segments, self.group)
            self.hide(name, rows.transpose(0, dim))


class RowwiseLayer(SplitLayer):
    """A linear layer of which this rank multiplies some of the input features."""

    def __init__(self, layer: Module, *others: Any) -> None:
        super().__init__(layer, *others)
        self.num_inputs = _num_features(layer, 1)
        self._bias: Tensor | None = None

    def prepare(self, value: Tensor) -> Tensor:
        """Return this rank's features of the input. The bias is added once, after the results are summed."""
        if isinstance(value, SplitTensor) and value.parts == Layout(value.ndim - 1, (self.num_inputs,)):
            value = value.local
        else:
            value = split_features(full(value), (self.num_inputs,), self.group)
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
        return SplitTensor.of(own, parts, self.group, self.run.streams)


class EmbeddingLayer(SplitLayer):
    """An embedding of which this rank has some of the rows.

    A rank looks up row 0 in place of rows that other ranks have. The gradient of such a row is zero, but the row does
    count as used: embeddings with `max_norm` or `scale_grad_by_freq` must stay whole.
    """

    layer: Embedding

    def __init__(self, layer: Module, *others: Any) -> None:
        super().__init__(layer, *others)
        self.rows = own_range(self.layer.num_embeddings, self.group)
        self._elsewhere: Tensor | None = None

    def prepare(self, value: Tensor) -> Tensor:
        """Return the indices among this rank's rows."""
        self.hide("padding_idx", local_padding_idx(self.layer.padding_idx, self.rows))
        local, self._elsewhere = own_rows_of_ids(value, self.rows, self.layer.num_embeddings)
        return local

    def finish(self, output: Tensor) -> Tensor:
        """Return the rows of all ranks."""
        elsewhere, self._elsewhere = self._elsewhere, None
        assert elsewhere is not None
        return rows_of_ids(output, elsewhere, self.group)


def own_rows_of_ids(ids: Tensor, rows: slice, num_embeddings: int) -> tuple[Tensor, Tensor]:
    """Return what this rank looks up among its own rows, and where another rank has the row.

    Args:
        ids: integers of any shape, equal on all ranks.
        rows: this rank's rows.
        num_embeddings: the number of rows of all ranks.

    Returns:
        The indices among this rank's rows, and a mask, both of the shape of `ids`.

    Raises:
        IndexError: an id is not a row. On CUDA, the kernel's assertion fails instead.
    """
    is_wrong = (ids < 0) | (ids >= num_embeddings)
    if ids.device.type == "cpu" and is_wrong.any():
        wrong = int(ids[is_wrong][0])
        raise IndexError(f"index {wrong} is out of range for an embedding with {num_embeddings} rows")
    is_elsewhere = (ids < rows.start) | (ids >= rows.stop)
    local_ids = (ids - rows.start).masked_fill(is_elsewhere, 0)
    # An index out of range makes the kernel fail, without a wait for the device here.
    return local_ids.masked_fill(is_wrong, rows.stop - rows.start), is_elsewhere


def rows_of_ids(output: Tensor, is_elsewhere: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the embeddings of all ids, from those of this rank. *Collective* in the forward pass.

    The result is exact: one rank contributes each row, and the others add zeros.

    Args:
        output: what this rank has looked up, of shape `[*ids.shape, d]`.
        is_elsewhere: the mask that `own_rows_of_ids` has returned.
        group: the ranks.
    """
    return sum_over_ranks(output.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), group)


def local_padding_idx(padding_idx: int | None, rows: slice) -> int | None:
    """Return the index of the padding row among this rank's rows; `None` if there is none.

    Args:
        padding_idx: `torch.nn.Embedding.padding_idx`, which is not negative.
        rows: this rank's rows.
    """
    if padding_idx is None or not rows.start <= padding_idx < rows.stop:
        return None
    index: int = padding_idx - rows.start
    return index


def layer_class(layer: Module, style: str) -> Callable[..., SplitLayer]:
    """Return the class that computes `layer` as `split` says."""
    if isinstance(layer, Embedding):
        return EmbeddingLayer
    return RowwiseLayer if style == "rowwise" else ColwiseLayer


def full(value: Tensor) -> Tensor:
    """Return `value`, gathered if it is split."""
    return value.full() if isinstance(value, SplitTensor) else value


def _num_features(layer: Any, dim: int) -> int:
    size: int = layer.weight.shape[1 - dim if is_conv1d(layer) else dim]
    return size
