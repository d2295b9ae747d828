"""Send the state of a run that ended on rank 0 to the process that started the ranks.

In a script, rank 0 is the user's own process, so that after a run its module, callbacks and Trainer have the state of
the run. Forked and spawned ranks are other processes, so this state is copied. Optimizers are not.
"""

import hashlib
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from lightning_paral.distributed.rng_state import global_states, set_global_states
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.engine_attributes import attributes_without_engine, class_without_engine, is_left_partitioned
from lightning_paral.strategies.keyed_pickle import Key, pickle_with_keys, unpickle_with_keys

MAX_ATTRIBUTE_BYTES = 256 * 2**20
"""Larger attributes of modules, callbacks, loggers and data modules are not copied."""

_PROGRESS = "lightning.pytorch.loops.progress"
_LOOPS = (
    "fit_loop",
    "fit_loop.epoch_loop",
    "fit_loop.epoch_loop.automatic_optimization",
    "fit_loop.epoch_loop.manual_optimization",
    "fit_loop.epoch_loop.val_loop",
    "validate_loop",
    "test_loop",
    "predict_loop",
)
_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


class RankZeroState:
    """Finds out on rank 0 what a run has changed. Create it before the run.

    Args:
        trainer: the Trainer of the run.
        arguments: the arguments of the run, which may contain a data module.
    """

    def __init__(self, trainer: Trainer, arguments: tuple[Any, ...]) -> None:
        self._trainer, self._arguments = trainer, arguments
        self._owners = _owners(trainer, arguments)
        self._before = {key: _digests(owner, self._pickled) for key, owner in self._owners.items()}
        self._names = _tensor_names(_module_of(trainer))

    def save(self, result: Any, folder: Path) -> None:
        """Write the state of the run, and what the run returned, to files in `folder`.

        Raises:
            ConfigurationError: the module has layers that were created in the run and cannot be pickled, or stayed
                sharded; or `result` cannot be pickled.
        """
        trainer = self._trainer
        module = _module_of(trainer)
        is_fit = trainer.state.fn == "fit"
        changed = {key: self._changed(key, owner) for key, owner in self._owners.items()}
        metrics = {name: _on_cpu(dict(getattr(trainer, name))) for name in _METRICS}
        state = {
            "new": self._new_members(module),
            "changed": changed,
            "loops": {path: _progress(loop) for path, loop in _loops(trainer)},
            "trainer": (trainer.state, trainer.should_stop),
            "metrics": metrics,
            "random": global_states(),
            "training": {name: each.training for name, each in module.named_modules()},
            "result": self._pickled(_on_cpu(result), limit=None),
        }
        if state["result"] is None:
            raise ConfigurationError(
                f"The run returned {type(result).__name__}, which cannot be pickled, and forked and spawned ranks send "
                "it to the process that started them. Return tensors, numbers, or objects that can be pickled."
            )
        (folder / "state").write_bytes(pickle.dumps(state))
        if is_fit:
            _save_tensors(module, folder / "tensors")

    def _changed(self, key: Key, owner: object) -> dict[str, bytes | None]:
        """Return the pickled attributes that the run has changed; `None` for those that it has removed."""
        before = self._before[key]
        changed: dict[str, bytes | None] = {name: None for name in before if name not in _attributes(owner)}
        for name, value in _attributes(owner).items():
            pickled = self._pickled(value)
            if pickled is not None and before.get(name) != _digest(pickled):
                changed[name] = pickled
        return changed

    def _new_members(self, module: LightningModule) -> dict[str, bytes]:
        """Return the pickled members of the module whose tensors the run has created, removed or renamed."""
        different = _tensor_names(module) ^ self._names
        new = {}
        for name in sorted({name.partition(".")[0] for name in different}):
            pickled = self._pickled(getattr(module, name, None), limit=None, is_new=True)
            if pickled is None:
                raise ConfigurationError(
                    f"The run created the member {name!r} of {type(module).__name__}, which cannot be pickled and sent "
                    "to the process that started the ranks. Create it in __init__, or load the weights from a "
                    "checkpoint of the run."
                )
            new[name] = pickled
        return new

    def _pickled(self, value: object, limit: int | None = MAX_ATTRIBUTE_BYTES, is_new: bool = False) -> bytes | None:
        """Return `value` pickled; `None` if it cannot be pickled, or if it is larger than `limit` bytes."""
        keys = {id(owner): key for key, owner in self._owners.items() if not (is_new and key[0] == "module" and key[1])}
        keys |= {id(loop): ("loop", path) for path, loop in _loops(self._trainer)}
        if not is_new:
            keys |= {id(tensor): ("tensor", name) for name, tensor in _tensors(_module_of(self._trainer))}
        return pickle_with_keys(value, keys, limit)


def restore(trainer: Trainer, arguments: tuple[Any, ...], folder: Path) -> Any:
    """Give the Trainer, its module and its callbacks the state in `folder`, and return what the run returned."""
    state = pickle.loads((folder / "state").read_bytes())
    module, owners = _module_of(trainer), _owners(trainer, arguments)
    module.trainer = trainer
    datamodule = owners.get(("datamodule",))
    if isinstance(datamodule, LightningDataModule):
        trainer.datamodule, datamodule.trainer = datamodule, trainer  # type: ignore[attr-defined]
    for name, pickled in state["new"].items():
        value = _unpickled(pickled, trainer, owners)
        if hasattr(module, name):
            delattr(module, name)
        if value is not None:
            setattr(module, name, value)
    if (folder / "tensors").exists():
        _load_tensors(module, folder / "tensors")
    for name, each in module.named_modules():
        each.training = state["training"].get(name, each.training)
    for key, changed in state["changed"].items():
        for name, pickled in changed.items():
            # First: it asks for all modules, and the hash of a metric needs all of the metric's attributes.
            value = None if pickled is None else _unpickled(pickled, trainer, owners)
            vars(owners[key]).pop(name, None)
            if pickled is not None:
                vars(owners[key])[name] = value
    for path, loop in _loops(trainer):
        vars(loop).update(state["loops"].get(path, {}))
    trainer.state, trainer.should_stop = state["trainer"]
    for name in _METRICS:
        metrics: dict[str, Any] = getattr(trainer, name)
        metrics.clear()
        metrics.update(state["metrics"][name])
    set_global_states(state["random"])
    return _unpickled(state["result"], trainer, owners)


def _module_of(trainer: Trainer) -> LightningModule:
    module = trainer.strategy.lightning_module
    assert module is not None
    return module


def _owners(trainer: Trainer, arguments: tuple[Any, ...]) -> dict[Key, Any]:
    """Return the objects whose attributes are copied, and others that both processes have, by key."""
    owners: dict[Key, Any] = {("trainer",): trainer, ("strategy",): trainer.strategy}
    owners |= {("module", name): each for name, each in _module_of(trainer).named_modules()}
    owners |= {("callback", str(number)): each for number, each in enumerate(vars(trainer)["callbacks"])}
    owners |= {("logger", str(number)): each for number, each in enumerate(trainer.loggers)}
    for each in (*arguments, getattr(trainer, "datamodule", None)):
        if isinstance(each, LightningDataModule):
            owners[("datamodule",)] = each
    return owners


def _attributes(owner: object) -> dict[str, Any]:
    """Return the attributes of the user's objects that may be copied."""
    if isinstance(owner, Trainer) or owner.__class__.__module__.startswith("lightning_paral.strategies"):
        return {}
    if isinstance(owner, Module):
        internal = vars(LightningModule()) if isinstance(owner, LightningModule) else vars(Module())
        own = attributes_without_engine(vars(owner), class_without_engine(type(owner)))
        return {name: value for name, value in own.items() if name not in internal}
    if not hasattr(owner, "__dict__"):
        return {}
    return {name: value for name, value in vars(owner).items() if not isinstance(value, Trainer)}


def _digests(owner: object, pickled: Any) -> dict[str, bytes | None]:
    return {name: _digest(pickled(value)) for name, value in _attributes(owner).items()}


def _digest(pickled: bytes | None) -> bytes | None:
    return None if pickled is None else hashlib.sha256(pickled).digest()


def _loops(trainer: Trainer) -> Iterator[tuple[str, Any]]:
    for path in _LOOPS:
        loop: Any = trainer
        for part in path.split("."):
            loop = getattr(loop, part)
        yield path, loop


def _progress(loop: Any) -> dict[str, Any]:
    """Return the counters and flags of a loop."""
    return {
        name: value
        for name, value in vars(loop).items()
        if isinstance(value, bool | int | float) or type(value).__module__ == _PROGRESS
    }


def _tensors(module: Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _tensor_names(module: Module) -> set[str]:
    return {name for name, _ in _tensors(module)}


def _save_tensors(module: LightningModule, path: Path) -> None:
    """Write parameters and buffers to `path`.

    Raises:
        ConfigurationError: parameters stayed sharded.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or is_left_partitioned(parameter):
            raise ConfigurationError(
                f"The parameter {name} stayed sharded after the fit, for the reason in the warning above, so the "
                "weights cannot be sent to the process that started the ranks. Load them from a checkpoint of the run."
            )
    torch.save({name: (tensor.detach().cpu(), tensor.requires_grad) for name, tensor in _tensors(module)}, path)


@torch.no_grad()
def _load_tensors(module: LightningModule, path: Path) -> None:
    stored = torch.load(path, weights_only=True)
    for name, tensor in _tensors(module):
        value, requires_grad = stored[name]
        if tensor.dtype == value.dtype and tensor.shape == value.shape:
            tensor.copy_(value)
        else:
            tensor.data = value.to(tensor.device)
        if isinstance(tensor, Parameter):
            tensor.requires_grad_(requires_grad)


def _on_cpu(value: Any) -> Any:
    """Return `value` with its tensors on the CPU, without gradients, in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _on_cpu(each) for key, each in value.items()} if type(value) is dict else value
    if type(value) in (list, tuple):
        return type(value)(map(_on_cpu, value))
    return value


def _unpickled(pickled: bytes, trainer: Trainer, owners: Mapping[Key, Any]) -> Any:
    objects: dict[Key, Any] = dict(owners)
    objects |= {("loop", path): loop for path, loop in _loops(trainer)}
    objects |= {("tensor", name): tensor for name, tensor in _tensors(_module_of(trainer))}
    return unpickle_with_keys(pickled, objects)
