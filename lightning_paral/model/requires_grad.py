"""Detect changes of `requires_grad` during a run, and check that all ranks make the same changes."""

import json
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
from torch.nn import Module, Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lightning_paral.distributed.exchange import Facts, check_same, first_difference
from lightning_paral.distributed.mesh import ParallelDims
from lightning_paral.distributed.watcher import exchange_in_store
from lightning_paral.errors import ConfigurationError

_SAME_GRADIENTS = (
    "Gradients are averaged over all ranks, so set the same requires_grad on all of them, in the same step."
)
_requires_grad = attrgetter("requires_grad")


class TrainedParameters:
    """Tracks which parameters of a module require a gradient.

    A check takes about 30 ns per parameter. It also detects new parameters, with torch's global registration hooks.

    Args:
        module: the module whose parameters are tracked.
        undo: removes the registration hooks when it is closed.
    """

    def __init__(self, module: Module, undo: ExitStack) -> None:
        self._module = module
        for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
            undo.callback(register(self._note_registration).remove)
        self.parameters: list[Parameter]
        """All parameters as of the last `update`."""
        self.has_new: bool
        """Whether a parameter may be new since then."""
        self.flags: list[bool]
        """Which of `parameters` required a gradient then."""
        self.epoch: int | None = None
        """The epoch of the last `follow`."""
        self._key: str
        """Of the epoch, equal on all ranks: the store may still hold keys of an earlier fit."""
        self.update()

    @property
    def all_by_name(self) -> dict[str, Parameter]:
        """All parameters as of the last `update`, by name."""
        return dict(zip(self._names, self.parameters, strict=True))

    def current_by_name(self) -> dict[str, Parameter]:
        """Return all parameters that the module has now, by name."""
        return dict(self._module.named_parameters())

    @property
    def by_name(self) -> dict[str, Parameter]:
        """The parameters that require a gradient, in the module's order: those that a new DDP reducer would have."""
        return {name: parameter for name, parameter in self.all_by_name.items() if parameter.requires_grad}

    def have_changed(self) -> bool:
        """Return whether a `requires_grad` has changed since the last `update`, or a parameter may be new."""
        return self.has_new or self._read() != self.flags

    def update(self) -> None:
        """Find all parameters, and read their flags."""
        named = self.current_by_name()
        self._names, self.parameters = list(named), list(named.values())
        self.has_new = False
        self.flags = self._read()

    def follow(
        self,
        epoch: int,
        batch_idx: int,
        dims: ParallelDims,
        timeout: timedelta,
        is_relevant: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Call `update` if the flags may have changed. *Collective* over the data ranks in the first step of an epoch.

        After a relevant change in a later step, each rank that made it waits for the others, and raises if one of them
        has not made a change before the timeout.

        Args:
            epoch: the epoch of the step that begins.
            batch_idx: the batch index of the step that begins.
            dims: the ranks of the run. Ranks that differ only in their data rank must train the same parameters.
            timeout: how long to wait for other ranks.
            is_relevant: called after the update; returns whether all ranks must agree on a change.

        Returns:
            Whether `update` was called.

        Raises:
            ConfigurationError: the ranks train different parameters. The message names one.
        """
        epoch_begins, self.epoch = epoch != self.epoch, epoch
        if not epoch_begins and not self.have_changed():
            return False
        before = [name for name, flag in zip(self._names, self.flags, strict=True) if flag]
        self.update()
        names, ranks = list(self.by_name), dims.data_ranks
        if epoch_begins and len(ranks) > 1:
            check_same(_facts(names), _SAME_GRADIENTS, dims.data_rank_group().group)
            self._key = dims.data_rank_group().gather(uuid.uuid4().hex)[0]
        elif not epoch_begins and len(ranks) > 1 and names != before and is_relevant():
            # Not a collective: a rank that has not made the change may be in another one.
            found = exchange_in_store(f"requires_grad/{self._key}/{batch_idx}", json.dumps(names), timeout, ranks)
            by_rank = {rank: _facts(json.loads(found[rank]) if rank in found else before) for rank in ranks}
            if any(facts != _facts(names) for facts in by_rank.values()):
                raise ConfigurationError(f"{first_difference(by_rank)}. {_SAME_GRADIENTS}")
        return True

    def _read(self) -> list[bool]:
        with torch.DisableTorchFunctionSubclass():  # sharded parameters would be asked one by one, in Python
            return list(map(_requires_grad, self.parameters))

    def _note_registration(self, *_: Any) -> None:
        self.has_new = True


def _facts(trained: list[str]) -> Facts:
    return {(f"requires_grad=True of {name}", "is"): "set" for name in trained}


def first_names(names: list[str]) -> str:
    """Return the first of `names`, joined for an error message."""
    return f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
