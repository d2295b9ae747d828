"""Record which parameters got gradients for a step, and leave the others unchanged, as torch's optimizers do.

An optimizer under ZeRO steps on flat tensors, in which a parameter without a gradient has a gradient of zero: momentum
would still move it, and weight decay would shrink it. `DistributedDataParallel` rejects such parameters unless
`find_unused_parameters` is set.
"""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_paral.engines.zero.state.fp32_partitions import FlatRange, Partition
from lightning_paral.errors import UnusedParametersError
from lightning_paral.model.requires_grad import first_names

NamedParameters = Sequence[tuple[str, Parameter]]


class Usage:
    """Records which parameters got a gradient in each accumulation window.

    Args:
        parameters: the parameters that the optimizer trains, and their names.
        partitions: the partitions with this rank's flat ranges of the parameters.
        find_unused: whether the ranks compare their parameters without gradients in every step, not only in the first.
        in_order: whether gradients are reduced in the order in which the backward pass produces them.
    """

    def __init__(
        self, parameters: NamedParameters, partitions: Iterable[Partition], *, find_unused: bool, in_order: bool
    ) -> None:
        self._parameters = list(parameters)
        self._numbers = {id(parameter): number for number, (_, parameter) in enumerate(self._parameters)}
        self._partitions = list(partitions)
        self._find_unused = find_unused
        self._in_order = in_order
        self._used: set[int] = set()
        self._orders: list[list[int]] = []
        """For each backward pass of the window, the indices of parameters in the order of their gradients."""
        self._seen_orders: list[list[tuple[list[int], set[int]]]] = []
        """For each backward pass of a window: the orders seen so far, each with the parameters that were trained."""
        self.is_backward_running = False
        """Whether the strategy is running a backward pass."""
        self.was_reached = False
        """Whether a parameter got a gradient since `was_reached` was last set to `False`."""
        self.has_outside_gradients = False
        """Whether parameters got gradients in a backward pass that the strategy did not run."""
        self._num_steps = 0
        self._num_taken: dict[int, int] = {}
        self.loaded: set[int] = set()
        """The ids of the parameters whose states were loaded from a checkpoint."""
        self._never_used: set[int] | None = None
        self.unused: NamedParameters = ()
        """The parameters that no rank used in the last closed window."""
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._record)  # type: ignore[no-untyped-call]
            for _, parameter in self._parameters
        ]

    def _record(self, parameter: Tensor) -> None:
        self._used.add(id(parameter))
        if self._in_order and self._orders:
            self._orders[-1].append(self._numbers[id(parameter)])
        self.was_reached = True
        if not self.is_backward_running:
            self.has_outside_gradients = True

    def begin_pass(self) -> None:
        """Begin to record another backward pass of the window."""
        self.is_backward_running = True
        self._orders.append([])

    def end_pass(self) -> None:
        """End the backward pass. Later gradients come from one that the strategy does not run."""
        self.is_backward_running = False

    def covers(self, parameter: Parameter) -> bool:
        """Return whether the optimizer trains `parameter`."""
        return id(parameter) in self._numbers

    def end(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()

    @property
    def has_begun(self) -> bool:
        """Whether a parameter got a gradient in this window, on this rank."""
        return bool(self._used)

    def not_yet_used(self) -> NamedParameters:
        """Return the parameters that have not got a gradient in this window yet, on this rank."""
        if len(self._used) == len(self._parameters):
            return ()
        return [(name, parameter) for name, parameter in self._parameters if id(parameter) not in self._used]

    def missed_by_last_pass(self) -> NamedParameters:
        """Return the parameters that got gradients in earlier backward passes of the window, but not in the last one.

        Valid only if the order of gradients is recorded (`in_order`).
        """
        in_last = set(self._orders[-1]) if self._orders else set()
        if len(in_last) == len(self._used):
            return ()
        return [
            (name, parameter)
            for number, (name, parameter) in enumerate(self._parameters)
            if id(parameter) in self._used and number not in in_last
        ]

    def close_window(self) -> None:
        """Determine which parameters no rank used in the window.

        *Collective* in all windows with `find_unused`; otherwise in the first window, and in windows with more backward
        passes than any before.

        Raises:
            UnusedParametersError: the ranks used different parameters; without `find_unused`, different parameters
                were used than in the first step, or gradients came in a different order; or the optimizer counts steps,
                and a parameter that skipped some is used again.
        """
        missing = self.not_yet_used()
        orders = [order for order in self._orders if order]
        compared = self._ranks_compare or (len(orders) > len(self._seen_orders) and _num_ranks() > 1)
        if compared:
            missing = self._unused_on_all_ranks(orders)
        if self._never_used is None:
            self._never_used = {id(parameter) for _, parameter in missing if parameter.requires_grad}
        elif not self._find_unused and (missing or self._never_used):
            self._check_matches_first(missing)
        if not self._find_unused and _num_ranks() > 1:
            self._compare_orders(orders, compared=compared)
        if missing or self._num_taken:
            self._count(missing)
        self._num_steps += 1
        self.unused = missing
        self.forget_window()

    @property
    def _ranks_compare(self) -> bool:
        """Whether the ranks compare their parameters in this window."""
        return self._never_used is None or self._find_unused

    def has_state(self, parameter: Parameter) -> bool:
        """Return whether the optimizer has stepped on `parameter`. If not, its state comes from gradients of zero."""
        return id(parameter) in self.loaded or self._num_taken.get(id(parameter), self._num_steps) > 0

    def forget_window(self) -> None:
        """Drop what was recorded since the last step."""
        self._used.clear()
        self._orders = []

    def guard(self, optimizer: Optimizer) -> None:
        """Make the steps of `optimizer`, the one that DeepSpeed runs, keep values and states of unused parameters."""
        step = optimizer.step

        def guarded(*args: Any, **kwargs: Any) -> Any:
            kept = [{key: t.clone() for key, t in shards.items()} for shards in self._unused_shards(optimizer)]
            result = step(*args, **kwargs)
            for shards, before in zip(self._unused_shards(optimizer), kept, strict=True):
                for key, shard in shards.items():
                    if key in before:
                        shard.copy_(before[key])
                    else:
                        shard.zero_()  # this step created the state
            return result

        optimizer.step = guarded  # type: ignore[method-assign]

    def _unused_shards(self, optimizer: Optimizer) -> list[dict[str | None, Tensor]]:
        """Return this rank's shards of each unused parameter: its values by the key `None`, its states by name."""
        if not self.unused:
            return []
        stepping = {id(flat) for group in optimizer.param_groups for flat in group["params"]}
        return [
            _shards_in(partition, partition.ranges[id(parameter)])
            for partition in self._partitions
            if id(partition.flat) in stepping
            for _, parameter in self.unused
            if id(parameter) in partition.ranges
        ]

    def _unused_on_all_ranks(self, orders: list[list[int]]) -> NamedParameters:
        """Return the parameters that no rank used. *Collective*.

        Raises:
            UnusedParametersError: ranks used different parameters, or a different order. All ranks raise it.
        """
        used = [id(parameter) in self._used for _, parameter in self._parameters]
        order = zlib.crc32(repr(orders).encode())
        # In host memory, because reading flags from a GPU would wait for all work that is queued there.
        flags = torch.tensor(
            [*used, *(not is_used for is_used in used), order, -order], dtype=torch.int64, device="cpu"
        )
        if dist.is_initialized():
            dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        *either, highest, lowest = flags.tolist()
        by_some, not_by_some = either[: len(used)], either[len(used) :]
        names = [name for (name, _), *both in zip(self._parameters, by_some, not_by_some, strict=True) if all(both)]
        if names or highest != -lowest:
            what = (
                f"Only some ranks got gradients for {first_names(names)}"
                if names
                else "Gradients came in a different order on some ranks"
            )
            raise UnusedParametersError(
                f"{what}. ZeRO matches the gradients of the ranks by position, so it would add up "
                "gradients of different parameters. Make the loss of every rank depend on the same parameters in the "
                "same order (0 * parameter.sum() is enough), or train with paral_ddp."
            )
        return [pair for pair, used_by_some in zip(self._parameters, by_some, strict=True) if not used_by_some]

    def _check_matches_first(self, missing: NamedParameters) -> None:
        assert self._never_used is not None
        now = {id(parameter) for _, parameter in missing}
        left_out = [n for n, p in missing if p.requires_grad and id(p) not in self._never_used]
        new = [name for name, parameter in self._parameters if id(parameter) in self._never_used - now]
        if left_out or new:
            what = "got no gradient in this step" if left_out else "without a gradient in the first step got one now"
            raise UnusedParametersError(
                f"Parameters {what}: {first_names(left_out or new)}. torch's optimizers skip parameters without a "
                "gradient. ZeRO can skip them only if all ranks know which ones they are. Set "
                "ParalZeROStrategy(find_unused_parameters=True) to let ranks compare them in every step; make the loss "
                "depend on them; or freeze them with requires_grad_(False)."
            )

    def _compare_orders(self, orders: list[list[int]], *, compared: bool) -> None:
        """Compare the order of gradients in each backward pass with the same pass of earlier windows.

        Parameters that are frozen in either window are not compared.

        Args:
            orders: the order in each backward pass of this window.
            compared: whether the ranks have compared their orders in this window. New orders are then accepted.

        Raises:
            UnusedParametersError: a pass reached different parameters, or reached them in a different order.
        """
        for index, order in enumerate(orders):
            if index == len(self._seen_orders):
                self._seen_orders.append([])
            seen = self._seen_orders[index]
            if any(order == earlier for earlier, _ in seen):
                continue
            trained = {number for number, (_, parameter) in enumerate(self._parameters) if parameter.requires_grad}
            if not compared and not any(
                _select_in_order(trained & trained_then, order) == _select_in_order(trained & trained_then, earlier)
                for earlier, trained_then in seen
            ):
                raise UnusedParametersError(
                    "Gradients came in a different order than in an earlier step. ZeRO matches the gradients of the "
                    "ranks by position: if the order differs between ranks, it adds up gradients of different "
                    "parameters. Set ParalZeROStrategy(find_unused_parameters=True) to let ranks compare the order in "
                    "every step, or train with paral_ddp."
                )
            seen.append((order, trained))

    def _count(self, missing: NamedParameters) -> None:
        """Count the steps that each parameter takes.

        Raises:
            UnusedParametersError: the optimizer counts steps, and a parameter that skipped some is used again.
        """
        left_out = {id(parameter) for _, parameter in missing}
        for name, parameter in self._parameters:
            taken = self._num_taken.setdefault(id(parameter), self._num_steps)
            if id(parameter) in left_out:
                continue
            if taken < self._num_steps and self._counts_steps(parameter):
                raise UnusedParametersError(
                    f"{name} took {taken} of {self._num_steps} steps and is used again. The optimizer counts the steps "
                    "of each parameter. Under ZeRO it has one count for all, and would not train this parameter as one "
                    "process does. Use an optimizer that does not count steps (SGD), or paral_fsdp or paral_ddp."
                )
            self._num_taken[id(parameter)] = taken + 1

    def _counts_steps(self, parameter: Parameter) -> bool:
        return any("step" in partition.state for partition in self._partitions if id(parameter) in partition.ranges)


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _select_in_order(numbers: set[int], order: list[int]) -> list[int]:
    return [number for number in order if number in numbers]


def _shards_in(partition: Partition, flat_range: FlatRange) -> dict[str | None, Tensor]:
    flat, state = partition.flat, partition.state
    tensors: dict[str | None, Tensor] = {None: flat.detach()}
    tensors |= {key: v for key, v in state.items() if isinstance(v, Tensor) and v.dim() and v.shape == flat.shape}
    return {key: tensor[flat_range.slice] for key, tensor in tensors.items()}
