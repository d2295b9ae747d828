"""One step of a `LightningModule` on several devices: scatter, replicate, run, gather."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_paral.data.parts import LogRecord, gather, join_training_output, merge_logs, split_batch
from lightning_paral.engines.dp.executor import run_replicas
from lightning_paral.engines.dp.manual import BackwardPermit, ManualOptimization, rejecting_replica_steps
from lightning_paral.engines.dp.metrics import MetricCopies
from lightning_paral.engines.dp.rendezvous import Rendezvous
from lightning_paral.engines.dp.replicate import Replicas
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.forward_mode import refusing_forward_mode

_NO_GRADIENT = (
    "A step seems to have read parameter.grad. Under paral_dp it runs in replicas, and only the module itself, which "
    "is replica 0, has gradients: in the other replicas parameter.grad is None. Clip with "
    "self.clip_gradients(optimizer, ...), leave out parameters whose grad is None, or use paral_ddp."
)
_FORWARD_MODE = (
    "Under paral_dp, replicas run in threads, which would share its state. Use torch.autograd.grad, or train with "
    "paral_ddp."
)
_FROZEN = (
    "A step froze or unfroze a parameter. Under paral_dp it runs in replicas, whose parameters are copies. Do so in a "
    "hook such as on_train_batch_start, or use paral_ddp."
)


def _explain(error: BaseException) -> str | None:
    """Return why an error occurs in a replica, whose parameters are copies; `None` for unrelated errors."""
    if "requires_grad flags of leaf variables" in str(error):
        return _FROZEN
    if isinstance(error, AttributeError) and error.obj is None and hasattr(Tensor, str(error.name)):
        return _NO_GRADIENT
    if isinstance(error, TypeError) and "'NoneType'" in str(error):
        return _NO_GRADIENT
    return None


class ParallelStep:
    """Runs the steps of `master` on several devices.

    Replica 0 is the master itself, so that changes to its buffers and attributes are kept. The other replicas are
    copies, which are discarded after the step.

    Args:
        master: the module; all its parameters are on `devices[0]`.
        devices: devices of the replicas.
        executor: has at least `len(devices) - 1` threads.
    """

    def __init__(self, master: LightningModule, devices: Sequence[torch.device], executor: Executor) -> None:
        self._master = master
        self._devices = list(devices)
        self._executor = executor
        self._metrics = [MetricCopies(device) for device in self._devices[1:]]
        self._replicas: Replicas | None = None
        self.num_running = 0
        """Number of replicas that run the current step; 0 if no step is running, or if it runs on the master only."""

    def copy_values(self) -> None:
        """Copy the master's current parameter values into the replicas of the last step, for its backward pass."""
        if self._replicas is not None:
            self._replicas.copy_values()

    def forget(self) -> None:
        """Free the replicas. Call it after their backward pass."""
        self._replicas = None

    def run(self, name: str, batch: Any, *args: Any) -> Any:
        """Run the step `name` on the replicas, and return what the master would return for the full `batch`.

        Raises:
            ConfigurationError: the batch cannot be divided, the results cannot be combined, or the replicas diverged.
        """
        self.forget()
        if len(self._devices) == 1:
            return getattr(self._master, name)(batch, *args)
        parts, sizes = split_batch(batch, self._devices)
        if len(parts) == 1:
            return getattr(self._master, name)(batch, *args)
        devices, metrics = self._devices[: len(parts)], self._metrics[: len(parts) - 1]
        permit, rendezvous = BackwardPermit(), Rendezvous(len(parts))
        replicas = Replicas(self._master, devices[1:], metrics, permit.check)
        modules = [self._master, *replicas.modules]
        logs = _make_log_records(sizes, metrics)
        manual = name == "training_step" and not self._master.automatic_optimization

        overrides: list[dict[str, Callable[..., Any]]] = [{"log": record.log} for record in logs]
        if manual:
            for index, methods in enumerate(overrides):
                optimization = ManualOptimization(self._master, index, rendezvous, replicas, sizes, devices[0], permit)
                methods.update(optimization.methods())
        for module, methods in zip(modules[1:], overrides[1:], strict=True):
            module.__dict__.update(methods, print=_print_nothing)
        calls = [
            partial(_call, module, name, part, args, partial(_join_replicas, rendezvous, index) if manual else None)
            for index, (module, part) in enumerate(zip(modules, parts, strict=True))
        ]
        self.num_running = len(parts)
        try:
            with (
                _overriding(self._master, overrides[0]),
                rejecting_replica_steps(rendezvous),
                refusing_forward_mode(_FORWARD_MODE),
            ):
                outputs = run_replicas(self._executor, calls, devices, rendezvous)
            replicas.check_frozen()
        except BaseException as error:
            for copies in metrics:
                copies.forget()
            explanation = _explain(error)
            if explanation is not None:
                raise ConfigurationError(f"{explanation}\nPython: {error}") from error
            raise
        finally:
            self.num_running = 0
        permit.grant()
        if name == "training_step":
            self._replicas = replicas

        for copies in metrics:
            copies.replay(devices[0])
        for arguments in merge_logs(logs, devices[0]):
            self._master.log(**arguments)
        join = join_training_output if name == "training_step" else gather
        return join(outputs, sizes, devices[0])


def _make_log_records(sizes: Sequence[int], metrics: Sequence[MetricCopies]) -> list[LogRecord]:
    copied = [LogRecord(size, copies.original_of) for size, copies in zip(sizes[1:], metrics, strict=True)]
    return [LogRecord(sizes[0], lambda value: value), *copied]


def _call(module: Any, name: str, part: Any, args: tuple[Any, ...], end: Callable[[], None] | None) -> Any:
    result = getattr(module, name)(part, *args)
    if end is not None:
        end()
    return result


def _join_replicas(rendezvous: Rendezvous, replica: int) -> None:
    rendezvous.run_once(replica, "the end", None, lambda _: None)


def _print_nothing(*_: Any, **__: Any) -> None:
    """Replace `self.print` in all replicas but the first, which prints for all."""


@contextmanager
def _overriding(module: LightningModule, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Override methods of `module` inside the block."""
    hidden = {name: module.__dict__[name] for name in methods if name in module.__dict__}
    module.__dict__.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del module.__dict__[name]
        module.__dict__.update(hidden)
