"""Which parameters are trained, noticed when it changes during a run, and the same on all ranks."""

import hashlib
import json
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from operator import attrgetter
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.nn import Module, Parameter
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lightning_paral.compat.torch.ddp_ignored import ignored_by_ddp
from lightning_paral.compat.torch.process_groups import default_store
from lightning_paral.errors import ConfigurationError

_requires_grad = attrgetter("requires_grad")


class TrainedParameters:
    """Watches `requires_grad` of the parameters of a module.

    A look takes some 30 nanoseconds per parameter. Parameters that are new in the module are noticed, too: torch tells
    when one is registered anywhere.

    Args:
        module: whose parameters are watched, but those it tells DDP to leave alone.
        undo: takes what ends the watch.
    """

    def __init__(self, module: Module, undo: ExitStack) -> None:
        self._module = module
        self._registered = False
        for register in (register_module_parameter_registration_hook, register_module_module_registration_hook):
            undo.callback(register(self._note_registration).remove)
        self._look_up()
        self._flags = self._read()

    @property
    def all_by_name(self) -> dict[str, Parameter]:
        """All parameters, as of the last look."""
        return dict(zip(self._names, self._parameters, strict=True))

    def current_by_name(self) -> dict[str, Parameter]:
        """All parameters the module has now."""
        ignored = ignored_by_ddp(self._module)
        return {name: p for name, p in self._module.named_parameters() if name not in ignored}

    @property
    def by_name(self) -> dict[str, Parameter]:
        """The parameters that are trained, in the order of the module: those a reducer made now would average."""
        return {name: parameter for name, parameter in self.all_by_name.items() if parameter.requires_grad}

    def have_changed(self) -> bool:
        """Whether others are trained than at the look before, or some parameter may be new."""
        return self._registered or self._read() != self._flags

    def look(self) -> list[str]:
        """Return the names of the parameters of which `requires_grad` is another than at the look before, or new."""
        before = dict(zip(self._names, self._flags, strict=True))
        objects = self.all_by_name
        self._look_up()
        self._flags = self._read()
        now = zip(self._names, self._parameters, self._flags, strict=True)
        return [name for name, p, flag in now if objects.get(name) is not p or before[name] != flag]

    def _read(self) -> list[bool]:
        return list(map(_requires_grad, self._parameters))

    def _look_up(self) -> None:
        named = self.current_by_name()
        self._names, self._parameters = list(named), list(named.values())
        self._registered = False

    def _note_registration(self, *_: Any) -> None:
        self._registered = True


class TrainingAgreement:
    """Sees to it that all ranks train the same parameters.

    Args:
        trained: watches those of this rank.
        timeout: how long other ranks are waited for.
    """

    def __init__(self, trained: TrainedParameters, timeout: timedelta) -> None:
        self.trained = trained
        self._timeout = timeout
        self._epoch: int | None = None
        self._epoch_name = ""
        """Rank 0's, drawn for each epoch: the store may still hold the keys of another fit."""

    def look(self, epoch: int, batch_idx: int, is_relevant: Callable[[], bool] = lambda: True) -> bool:
        """Look at `requires_grad` anew where that is due; return whether it was. *Collective* once per epoch.

        Also *collective* where something relevant has changed: a rank on which nothing has is found out then.

        Args:
            epoch: of the step that begins.
            batch_idx: of the step that begins.
            is_relevant: called after the look; whether a change has consequences, and the ranks have to agree on it.

        Raises:
            ConfigurationError: the ranks disagree; names the parameters.
        """
        epoch_begins, self._epoch = epoch != self._epoch, epoch
        if not epoch_begins and not self.trained.have_changed():
            return False
        changed = self.trained.look()
        where, names = f"At batch {batch_idx} of epoch {epoch}", list(self.trained.by_name)
        if epoch_begins:
            digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()
            told = _gather((digest, uuid4().hex))
            self._epoch_name = told[0][1]
            if len({each for each, _ in told}) > 1:
                _check_same(_gather(names), where)
        elif changed and is_relevant():
            key = f"requires_grad/{self._epoch_name}/{batch_idx}"
            told = _gather_in_store(
                json.dumps(names), key, self._timeout, lambda absent: _alone(where, changed, absent)
            )
            _check_same(list(map(json.loads, told)), where)
        return True


def listed(names: list[str]) -> str:
    """Return the first of `names` for an error."""
    return f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"


def _check_same(trained_by_rank: list[list[str]], where: str) -> None:
    trained = [set(names) for names in trained_by_rank]
    disputed = sorted(set().union(*trained) - trained[0].intersection(*trained))
    if not disputed:
        return
    ranks = [rank for rank, names in enumerate(trained) if disputed[0] in names]
    raise ConfigurationError(
        f"{where}, the ranks do not train the same parameters: {disputed[0]} has requires_grad=True on rank "
        f"{', '.join(map(str, ranks))} only. Gradients are averaged over all ranks, so set requires_grad alike on all "
        f"of them. Disputed: {listed(disputed)}."
    )


def _alone(where: str, changed: list[str], absent: list[int]) -> str:
    return (
        f"{where}, requires_grad of {listed(changed)} changed on this rank, but not on rank "
        f"{', '.join(map(str, absent))}. Gradients are averaged over all ranks, so set requires_grad alike on all of "
        "them, in the same step."
    )


def _gather(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _gather_in_store(value: str, key: str, timeout: timedelta, explain: Callable[[list[int]], str]) -> list[str]:
    # Unlike a collective of the backend this does no harm where some ranks do not call it, and can say which.
    store = default_store()
    keys = [f"lightning_paral/{key}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], value)
    try:
        store.wait(keys, timeout)
    except (dist.DistError, RuntimeError) as error:
        absent = [rank for rank, each in enumerate(keys) if not store.check([each])]
        raise ConfigurationError(explain(absent)) from error
    return [store.get(each).decode() for each in keys]
