"""Detect changes of `requires_grad` during a run, and check that all ranks make the same changes."""

import json
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from operator import attrgetter
from typing import Any

from torch.nn import Module, Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lightning_paral.compat.torch.autograd import DisableTorchFunctionSubclass
from lightning_paral.compat.torch.ddp import ignored_by_ddp
from lightning_paral.distributed.exchange import Facts, check_same, first_difference, name_ranks
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
        module: the module whose parameters are tracked, except those that it tells DDP to ignore.
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
        self._find_parameters()
        self.flags = self._read()
        """Which of `parameters` required a gradient then."""

    @property
    def all_by_name(self) -> dict[str, Parameter]:
        """All parameters as of the last `update`, by name."""
        return dict(zip(self._names, self.parameters, strict=True))

    def current_by_name(self) -> dict[str, Parameter]:
        """Return all parameters that the module has now, by name."""
        ignored = ignored_by_ddp(self._module)
        return {name: p for name, p in self._module.named_parameters() if name not in ignored}

    @property
    def by_name(self) -> dict[str, Parameter]:
        """The parameters that require a gradient, in the module's order: those that a new DDP reducer would have."""
        return {name: parameter for name, parameter in self.all_by_name.items() if parameter.requires_grad}

    def have_changed(self) -> bool:
        """Return whether a `requires_grad` has changed since the last `update`, or a parameter may be new."""
        return self.has_new or self._read() != self.flags

    def update(self) -> list[str]:
        """Read all flags; return the names of parameters that are new or whose flag has changed since the last call."""
        before = dict(zip(self._names, self.flags, strict=True))
        objects = self.all_by_name
        self._find_parameters()
        self.flags = self._read()
        now = zip(self._names, self.parameters, self.flags, strict=True)
        return [name for name, p, flag in now if objects.get(name) is not p or before[name] != flag]

    def _read(self) -> list[bool]:
        with DisableTorchFunctionSubclass():  # sharded parameters would be asked one by one, in Python
            return list(map(_requires_grad, self.parameters))

    def _find_parameters(self) -> None:
        named = self.current_by_name()
        self._names, self.parameters = list(named), list(named.values())
        self.has_new = False

    def _note_registration(self, *_: Any) -> None:
        self.has_new = True


class TrainingAgreement:
    """Checks that all ranks train the same parameters. Its construction is *collective* over the data ranks.

    Args:
        trained: the parameters of this rank.
        dims: the ranks of the run. Ranks that differ only in their data rank must train the same parameters.
        timeout: how long to wait for other ranks.
    """

    def __init__(self, trained: TrainedParameters, dims: ParallelDims, timeout: timedelta) -> None:
        self.trained = trained
        self._dims = dims
        self._timeout = timeout
        self.epoch: int | None = None
        """The epoch of the last step."""
        self._name = dims.data_rank_group().gather(uuid.uuid4().hex)[0]
        """Of this fit: the store may still hold keys of an earlier one."""

    def update(self, epoch: int, batch_idx: int, is_relevant: Callable[[], bool] = lambda: True) -> bool:
        """Read `requires_grad` again if it may have changed, and compare the ranks. *Collective* once per epoch.

        After a relevant change, each rank that made it waits for the others, and raises if one of them has not made a
        change before the timeout.

        Args:
            epoch: the epoch of the step that begins.
            batch_idx: the batch index of the step that begins.
            is_relevant: called after the flags have been read; returns whether all ranks must agree on a change.

        Returns:
            Whether `requires_grad` was read.

        Raises:
            ConfigurationError: the ranks disagree. The message names the parameters.
        """
        epoch_begins, self.epoch = epoch != self.epoch, epoch
        if not epoch_begins and not self.trained.have_changed():
            return False
        changed = self.trained.update()
        names, ranks = list(self.trained.by_name), self._dims.data_ranks
        if epoch_begins and len(ranks) > 1:
            check_same(_facts(names), _SAME_GRADIENTS, self._dims.data_rank_group().group)
        elif not epoch_begins and changed and is_relevant():
            key = f"requires_grad/{self._name}/{epoch}/{batch_idx}"
            found = exchange_in_store(key, json.dumps(names), self._timeout, ranks)
            absent = [rank for rank in ranks if rank not in found]
            if absent:
                raise ConfigurationError(
                    f"At batch {batch_idx} of epoch {epoch}, requires_grad of {first_names(changed)} changed on this "
                    f"rank, but not on {name_ranks(absent)}. {_SAME_GRADIENTS}"
                )
            if len(set(found.values())) > 1:
                by_rank = {rank: _facts(json.loads(of_rank)) for rank, of_rank in found.items()}
                raise ConfigurationError(f"{first_difference(by_rank)}. {_SAME_GRADIENTS}")
        return True


def _facts(trained: list[str]) -> Facts:
    return {(f"requires_grad=True of {name}", "is"): "set" for name in trained}


def first_names(names: list[str]) -> str:
    """Return the first of `names`, joined for an error message."""
    return f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
