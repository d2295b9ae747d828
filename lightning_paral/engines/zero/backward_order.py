"""Check that every backward pass gives a gradient to every trained parameter, on all ranks in the same order.

DeepSpeed reduces gradients by their position in buckets: if ranks produced them in different orders, it would add up
gradients of different parameters. The optimizer steps on flat tensors, in which a parameter without a gradient has a
gradient of zero: momentum would still move it, and weight decay would shrink it.
"""

import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from lightning_paral.compat.torch.autograd import DisableTorchFunctionSubclass
from lightning_paral.errors import ConfigurationError, UnusedParametersError
from lightning_paral.model.requires_grad import TrainedParameters, first_names

_INSTEAD = "Make the loss depend on all of them in every backward pass, or train with paral_fsdp."


class BackwardOrder:
    """Records the order in which trained parameters get gradients, from construction to `end`.

    Args:
        module: the module when the run begins.
        trained: the parameters that the optimizer trains, by name.
        matters: whether gradients are reduced in the order in which they come. Otherwise only missing ones are refused.
    """

    def __init__(self, module: Module, trained: Mapping[str, Parameter], *, matters: bool) -> None:
        self._matters = matters
        self._names = list(trained)
        self._numbers = {id(parameter): number for number, parameter in enumerate(trained.values())}
        self._undo = ExitStack()
        self._tracked = TrainedParameters(module, self._undo)
        self._at_start = self._tracked.by_name
        self._order: list[int] = []
        self._agreed: list[list[int]] = []
        """For each backward pass of a window, the order in the first window that had as many passes."""
        self._is_running = False
        self.has_outside_gradients = False
        """Whether parameters got gradients in a backward pass that the strategy did not run."""
        for parameter in trained.values():
            handle = parameter.register_post_accumulate_grad_hook(self._record)  # type: ignore[no-untyped-call]
            self._undo.callback(handle.remove)

    def covers(self, parameter: Parameter) -> bool:
        """Return whether the optimizer trains `parameter`."""
        return id(parameter) in self._numbers

    def check_fixed(self) -> None:
        """Raise a `ConfigurationError` if a parameter that requires a gradient did not when the run began."""
        with DisableTorchFunctionSubclass():  # reading attributes of partitioned parameters is slow otherwise
            if not self._tracked.have_changed():
                return
            now = self._tracked.current_by_name()
            self._tracked.update()
        added = [name for name, p in now.items() if p.requires_grad and self._at_start.get(name) is not p]
        if added:
            raise ConfigurationError(
                "These parameters require a gradient now, but were frozen or not in the module when the run began: "
                f"{first_names(added)}. ZeRO shards only what is trained from the beginning. Train with paral_fsdp or "
                "paral_ddp."
            )

    def _record(self, parameter: Tensor) -> None:
        if self._is_running:
            self._order.append(self._numbers[id(parameter)])
        else:
            self.has_outside_gradients = True

    def begin_pass(self) -> None:
        """Begin to record a backward pass."""
        self._is_running, self._order = True, []

    def end_pass(self, number: int) -> None:
        """Check the backward pass, the one with this `number` in its window. *Collective* if no window had so many.

        Raises:
            UnusedParametersError: a trained parameter got no gradient, the ranks differ, or the order has changed.
        """
        self._is_running = False
        if not self._matters:
            self._order.sort()
        if number < len(self._agreed):
            if self._order != self._agreed[number]:
                self._refuse()
            return
        if not _equal_on_all_ranks(self._order) or len(set(self._order)) < len(self._names):
            self._refuse()
        self._agreed.append(self._order)

    def _refuse(self) -> NoReturn:
        got = set(self._order)
        missing = [name for number, name in enumerate(self._names) if number not in got]
        if missing:
            raise UnusedParametersError(
                f"These parameters got no gradient in a backward pass: {first_names(missing)}. torch's optimizers skip "
                "them, but ZeRO steps on flat tensors and would change them. If they are never used, freeze them with "
                f"requires_grad_(False) before the run, not in it. {_INSTEAD}"
            )
        raise UnusedParametersError(
            "Gradients came in a different order than on other ranks, or than in an earlier step. ZeRO matches the "
            f"gradients of the ranks by position, so it would add up those of different parameters. {_INSTEAD}"
        )

    def end(self) -> None:
        """Stop recording."""
        self._undo.close()


def _equal_on_all_ranks(order: list[int]) -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    from deepspeed import comm

    digest = zlib.crc32(repr(order).encode())
    # In host memory, because reading it from a GPU would wait for all work that is queued there.
    bounds = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
    comm.all_reduce(bounds, op=comm.ReduceOp.MAX)  # waits for what is still sent
    return int(bounds[0]) == -int(bounds[1])
