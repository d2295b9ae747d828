"""One fit under local SGD: count steps, exchange weights between islands, and hold their mean during evaluation."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_paral.comm.coalescing import broadcast, group_by_dtype_and_device
from lightning_paral.comm.direct import int8_average
from lightning_paral.comm.reduction import WIRE_DTYPES
from lightning_paral.comm.ring import ring_all_reduce
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.engines.local_sgd.options import LocalSGDOptions
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.requires_grad import TrainedParameters, first_names

_BUCKET_BYTES = 64 * 2**20


class LocalSGDRun:
    """Lets islands train apart, and exchanges their weights every `period` steps. Creating it is *collective*.

    The first rank of each island has the weights of the last exchange, from which all islands started. In an exchange,
    the outer SGD steps from there, with the mean of what the islands have moved away as the gradient. With period 1 and
    its defaults this is DDP, if the inner optimizer is linear in the gradients, as SGD with momentum is.

    Follows Stich, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767, Lin et al., "Don't Use Large
    Mini-Batches, Use Local SGD", arXiv:1808.07217, and Douillard et al., "DiLoCo", arXiv:2311.08105.

    Args:
        strategy: the strategy, whose module has equal parameters and buffers on all ranks afterwards.
        options: its options.
        islands: the islands as replicas, and their ranks as shards.
        undo: undoes at the end of the run what this changes.
    """

    def __init__(self, strategy: Any, options: LocalSGDOptions, islands: ParallelDims, undo: ExitStack) -> None:
        self.module: LightningModule = strategy.lightning_module
        self._strategy, self._options, self.islands = strategy, options, islands
        self.island, self.is_first_rank = islands.rank // islands.shard, islands.rank % islands.shard == 0
        """The number of the island, and whether this rank exchanges for it."""
        self._device: torch.device = strategy.root_device
        self._backup = torch.device("cpu") if options.backup == "cpu" else self._device
        self._trained = TrainedParameters(self.module, undo)
        self.since = 0
        """The optimizer steps since the last exchange."""
        self._names: dict[Tensor, str] = {}
        """All parameters, with their names."""
        self._moved: list[Tensor] = []
        """The parameters that were trained since the last exchange."""
        kinds = {"last": True, "momentum": options.outer_momentum > 0, "errors": options.wire_dtype == "int8"}
        self._outer: dict[str, dict[str, Tensor]] = {kind: {} for kind, is_kept in kinds.items() if is_kept}
        """On the first rank of an island, by name: the weights of the last exchange, their momentum, and of int8 what
        was rounded off and has to be sent."""
        self._held: dict[Tensor, Tensor] | None = None
        """While the module holds the mean: the values that its tensors had."""
        self._follow_parameters()
        self._share_buffers()

    # Parameters

    def before_batch(self, batch_idx: int) -> None:
        """Follow changes of `requires_grad`. *Collective* in the first step of an epoch, and after a change.

        Raises:
            ConfigurationError: the ranks train different parameters.
        """
        strategy, epoch = self._strategy, self.module.current_epoch
        if self._trained.follow(epoch, batch_idx, strategy.dims, strategy.timeout):
            self._follow_parameters()
            if not self.since:  # hooks may have written weights, also after the setup
                self.settle()

    def _follow_parameters(self) -> None:
        named: dict[Tensor, str] = {parameter: name for name, parameter in self._trained.all_by_name.items()}
        new = {parameter: name for parameter, name in named.items() if parameter not in self._names}
        broadcast(new)
        self._names |= new
        self._moved = [*dict.fromkeys([*self._moved, *self._trained.by_name.values()])]
        for name, parameter in self._trained.by_name.items() if self.is_first_rank else ():
            if parameter in new or name not in self._outer["last"]:
                last = self._copy(parameter, torch.float32)
                for kind, tensors in self._outer.items():
                    tensors[name] = last if kind == "last" else torch.zeros_like(last)
        self._frozen = self._sums_of_frozen()

    def _sums_of_frozen(self) -> dict[str, str]:
        """Return a text for each parameter that is not exchanged, which changes with its values."""
        moved = set(self._moved)
        frozen = {name: each for each, name in self._names.items() if each not in moved}
        return {name: repr(each.detach().double().sum().item()) for name, each in frozen.items()}

    def _check_frozen(self) -> None:
        """Raise a `ConfigurationError` if user code has written parameters that are not exchanged."""
        now = self._sums_of_frozen()
        written = [name for name, before in self._frozen.items() if now.get(name, before) != before]
        if written:
            raise ConfigurationError(
                f"Parameters without requires_grad were written during training: {first_names(written)}. Islands do "
                "not exchange them, so they would differ. Make them buffers, which all islands then get from rank 0 in "
                "each exchange, or use paral_ddp."
            )

    def _copy(self, tensor: Tensor, at_least: torch.dtype) -> Tensor:
        return tensor.detach().to(self._backup, torch.promote_types(tensor.dtype, at_least), copy=True)

    def _share_buffers(self) -> None:
        """Give all ranks rank 0's buffers, as DDP does. *Collective* over the world."""
        broadcast(list(self.module.buffers()))

    # Steps

    def averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure of a step; in the warm-up, one that averages the gradients over the islands."""

        def and_average() -> Any:
            loss = closure()
            parameters = list(self._trained.by_name.values())
            shares = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
            self.average([shares])
            for parameter, share in zip(parameters, shares.tolist(), strict=True):
                if share and parameter.grad is None:  # only other islands have used it
                    parameter.grad = torch.zeros_like(parameter)
            self.average([parameter.grad for parameter in parameters if parameter.grad is not None])
            self._share_buffers()
            return loss

        return and_average if self.module.trainer.global_step < self._options.warmup_steps else closure

    def after_step(self) -> None:
        """Count an optimizer step, and exchange if that is due. If so, *collective* over the world."""
        done, warmup_steps = self.module.trainer.global_step + 1, self._options.warmup_steps
        self.since += done > warmup_steps
        if done == warmup_steps:
            self.settle()
        elif self.since >= self._options.steps_between:
            self._check_frozen()
            self._replace(self._moved, self._outer_step)
            self._share_buffers()
            self.since, self._moved = 0, [*self._trained.by_name.values()]
            self._frozen = self._sums_of_frozen()

    def _outer_step(self, flat: Tensor, parameters: Sequence[Tensor]) -> None:
        """Replace `flat`, the `parameters` of this island, by the weights with which all islands go on."""
        options, names = self._options, [self._names[parameter] for parameter in parameters]
        kept = {kind: [tensors[name] for name in names] for kind, tensors in self._outer.items()}
        joined = {kind: self._join(tensors) for kind, tensors in kept.items()}
        step = joined["last"] - flat
        self._reduce(step, WIRE_DTYPES.get(options.wire_dtype or ""), joined.get("errors"))
        if "momentum" in joined:
            velocity = joined["momentum"].mul_(options.outer_momentum).add_(step)
            step = step.add_(velocity, alpha=options.outer_momentum) if options.nesterov else velocity
        flat.copy_(joined["last"].sub_(step, alpha=options.outer_lr))
        for kind, tensors in kept.items():
            _split(joined[kind], tensors)

    # The mean

    def _join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the elements of all `tensors` on the device, in fp32 or wider."""
        dtype = torch.promote_types(tensors[0].dtype, torch.float32)
        return torch.cat([tensor.detach().reshape(-1).to(self._device, dtype) for tensor in tensors])

    def _replace(self, tensors: Sequence[Tensor], change: Callable[[Tensor, Sequence[Tensor]], None]) -> None:
        """Let `change` replace the elements of `tensors` on the first rank of each island. *Collective*."""
        for bucket in _buckets(tensors):
            flat = self._join(bucket)
            if self.is_first_rank:
                change(flat, bucket)
            if self.islands.shard > 1:
                dist.broadcast(flat, group_src=0, group=self.islands.replica_group())
            _split(flat, bucket)

    def _reduce(self, flat: Tensor, wire_dtype: torch.dtype | None = None, error: Tensor | None = None) -> None:
        """Replace `flat` by its mean over the islands. *Collective* over their first ranks."""
        if self.islands.replicate > 1 and error is not None:
            int8_average(flat, error, self.islands.replicate_group())
        elif self.islands.replicate > 1:
            ring_all_reduce(flat, self.islands.replicate_group(), op=dist.ReduceOp.AVG, wire_dtype=wire_dtype)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace `tensors` by their mean over the islands; nothing after a failure. *Collective* over the world."""
        if self._strategy.can_exchange:
            self._replace(tensors, lambda flat, bucket: self._reduce(flat))

    @property
    def _differs(self) -> bool:
        """Whether the module may hold something else than the mean, which can be computed."""
        return self.since > 0 and self._held is None and bool(self._strategy.can_exchange)

    def means(self) -> Mapping[Tensor, Tensor]:
        """Return those weights whose mean the module does not hold. *Collective* over the world if there are any."""
        means = {p: self._copy(p, p.dtype) for p in self._moved} if self._differs else {}
        self.average(list(means.values()))
        return means

    def take_mean(self) -> None:
        """Make the module hold the mean of the weights, and rank 0's buffers. *Collective* over the world."""
        if self._differs:
            self._held = {each: self._copy(each, each.dtype) for each in (*self._moved, *self.module.buffers())}
            self.average(self._moved)
            self._share_buffers()

    def give_back(self) -> None:
        """Restore what the module held before `take_mean`."""
        for tensor, value in (self._held or {}).items():
            tensor.detach().copy_(value)
        self._held = None

    def settle(self) -> None:
        """Begin a period with the weights that the module holds, which must be equal on all islands."""
        self._held, self.since = None, 0
        for parameter, name in self._names.items():
            last = self._outer["last"].get(name)
            # those of bf16 are more exact, and stay
            if last is not None and not torch.equal(last.to(parameter.device, parameter.dtype), parameter):
                last.copy_(parameter.detach())

    def tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint has, by name: states and, inside a period, weights and buffers."""
        kinds = {**self._outer}
        if self.since:
            kinds["weights"] = {self._names[parameter]: parameter for parameter in self._moved}
            kinds["buffers"] = dict(self.module.named_buffers())
        named = {f"{kind}/{name}": each for kind, tensors in kinds.items() for name, each in tensors.items()}
        for number, optimizer in enumerate(self._strategy.optimizers):
            for parameter, name in self._names.items():
                state = optimizer.state.get(parameter, {}).items()
                named |= {f"{number}/{key}/{name}": value for key, value in state if isinstance(value, Tensor)}
        return {name: (self._held or {}).get(tensor, tensor) for name, tensor in named.items()}


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield `tensors` in groups of one dtype and device, and of about 64 MiB."""
    for group in group_by_dtype_and_device(tensors):
        bucket = list[Tensor]()
        for tensor in group:
            bucket.append(tensor)
            if sum(each.nbytes for each in bucket) >= _BUCKET_BYTES or tensor is group[-1]:
                yield bucket
                bucket = []


def _split(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the elements of `flat` into `tensors`, in order."""
    for tensor, part in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))
