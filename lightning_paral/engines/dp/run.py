"""One run under DP: the replicas of each step, the threads that run them, and their backward pass."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.autograd import forward_ad

from lightning_paral.compat.lightning.methods import shadow_method
from lightning_paral.compat.torch.patches import replace_attributes
from lightning_paral.data.parts import LogRecord, gather, join_training_output, merge_logs, split_batch
from lightning_paral.engines.dp.metrics import MetricCopies
from lightning_paral.engines.dp.replicate import Replicas
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.user_hooks import has_hook

_MAY_CHANGE_WEIGHTS_BEFORE_BACKWARD = (
    "on_before_zero_grad",
    "on_before_backward",
    "optimizer_zero_grad",
    "backward",
)
_FORWARD_MODE = "enter_dual_level", "make_dual"


class DPRun:
    """Runs the steps of `master` on several devices, with a thread for each device except the first.

    Replica 0 is the master itself, so that changes to its buffers and attributes are kept. The other replicas are
    copies, which are discarded after the step.

    Args:
        master: the module; all its parameters are on `devices[0]`.
        devices: the devices of the replicas.
    """

    def __init__(self, master: LightningModule, devices: Sequence[torch.device]) -> None:
        self._master = master
        self._devices = list(devices)
        self._threads = ThreadPoolExecutor(max(1, len(devices) - 1), thread_name_prefix="paral_dp")
        self._metrics = [MetricCopies(device) for device in self._devices[1:]]
        self._copies_before_backward = has_hook(master, _MAY_CHANGE_WEIGHTS_BEFORE_BACKWARD)
        self._replicas: Replicas | None = None
        self.num_running_replicas = 0
        """Number of replicas that run the current step; 0 if no step is running, or if it runs on the master only."""

    def step(self, name: str, batch: Any, *args: Any) -> Any:
        """Run the step `name` on the replicas, and return what the master would return for the full `batch`.

        Raises:
            ConfigurationError: the batch cannot be divided, or the results cannot be combined.
        """
        self._replicas = None
        parts, sizes = split_batch(batch, self._devices) if len(self._devices) > 1 else ([batch], [1])
        if len(parts) == 1:
            return getattr(self._master, name)(batch, *args)
        devices, metrics = self._devices[: len(parts)], self._metrics[: len(parts) - 1]
        replicas = Replicas(self._master, devices[1:], metrics, self._check_outside_step)
        modules = [self._master, *replicas.modules]
        logs = [LogRecord(sizes[0])]
        logs += [LogRecord(size, copies.original_of) for size, copies in zip(sizes[1:], metrics, strict=True)]
        for module, log in zip(replicas.modules, logs[1:], strict=True):
            vars(module).update(log=log.log, print=_print_nothing)
        calls = [partial(getattr(module, name), part, *args) for module, part in zip(modules, parts, strict=True)]
        self.num_running_replicas = len(parts)
        try:
            with ExitStack() as undo:
                shadow_method(self._master, "log", logs[0].log, undo)
                undo.callback(replace_attributes(forward_ad, dict.fromkeys(_FORWARD_MODE, _refuse_forward_mode)))
                outputs = run_replicas(self._threads, calls, devices)
            replicas.check_frozen()
        except BaseException as error:
            for copies in metrics:
                copies.forget()
            if "requires_grad flags of leaf variables" in str(error):
                raise ConfigurationError(
                    "A step froze or unfroze a parameter. Under paral_dp it runs in replicas, whose parameters are "
                    "copies. Do so in a hook such as on_train_batch_start, or use paral_ddp."
                ) from error
            raise
        finally:
            self.num_running_replicas = 0

        for copies in metrics:
            copies.replay(devices[0])
        for arguments in merge_logs(logs, devices[0]):
            self._master.log(**arguments)
        if name != "training_step":
            return gather(outputs, sizes, devices[0])
        self._replicas = replicas
        return join_training_output(outputs, sizes, devices[0])

    def backward(self, backward: Callable[..., Tensor], loss: Tensor, args: Any, kwargs: Any) -> Tensor:
        """Run `backward(loss, *args, **kwargs)` through all replicas, free them, and return its result."""
        if self._replicas is not None and self._copies_before_backward and loss.requires_grad:
            # A hook on the loss, because it runs after `on_before_backward`, which may change weights.
            loss.register_hook(partial(_copy_values, self._replicas))  # type: ignore[no-untyped-call]
        result = backward(loss, *args, **kwargs)
        self._replicas = None
        return result

    def end(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    def _check_outside_step(self) -> None:
        if self.num_running_replicas:
            raise ConfigurationError(
                "A replica of paral_dp ran a backward pass of its own inside a step. Gradients of all replicas are "
                "computed together, after the step. Call torch.autograd.grad(loss, inputs) for gradients with respect "
                "to inputs, or use paral_ddp."
            )


def _copy_values(replicas: Replicas, gradient: Tensor) -> None:
    replicas.copy_values()


def _print_nothing(*_: Any, **__: Any) -> None:
    """Replace `self.print` in all replicas but the first, which prints for all."""


def _refuse_forward_mode(*_: Any, **__: Any) -> NoReturn:
    raise ConfigurationError(
        "Code in a step uses forward-mode automatic differentiation, as torch.func.jvp does. Under paral_dp, replicas "
        "run in threads, which would share its state. Use torch.autograd.grad, or train with paral_ddp."
    )


# The threads: the first replica runs in that of the caller, each of the others in one of its own


def run_replicas(executor: Executor, calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device]) -> list[Any]:
    """Run `calls` concurrently, one per device, and return their results in order.

    Each call runs with the caller's grad mode, inference mode, autocast state and current stream, all of which torch
    keeps per thread.

    Args:
        executor: runs all calls except the first; needs a thread for each of them.
        calls: one per replica.
        devices: devices of the replicas.

    Raises:
        BaseException: the error of the failed replica with the lowest index, with a note that names the replica.
            Raised after all replicas have ended.
    """
    state = _ThreadState(devices)
    others = [executor.submit(state.call, index, call) for index, call in enumerate(calls[1:], start=1)]
    first: Future[Any] = Future()
    try:
        first.set_result(calls[0]())
    except BaseException as error:
        first.set_exception(error)
    wait(others)
    for index, replica in enumerate([first, *others]):
        failure = replica.exception()
        if failure is not None:
            failure.add_note(f"This was raised in replica {index} of {len(calls)} (paral_dp), on {devices[index]}.")
            raise failure
    return [replica.result() for replica in [first, *others]]


class _ThreadState:
    """The state that torch keeps per thread, read in the thread that creates this object."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type))
            for device_type in {"cpu", *(device.type for device in devices)}
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._streams = [torch.cuda.current_stream(device) if device.type == "cuda" else None for device in devices]

    def call(self, index: int, function: Callable[[], Any]) -> Any:
        """Return the result of `function`, called with this state on the device of replica `index`."""
        with ExitStack() as contexts:
            contexts.enter_context(torch.inference_mode(self._inference))
            contexts.enter_context(torch.set_grad_enabled(self._grad))
            for device_type, dtype, enabled in self._autocast:
                contexts.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled=self._cache))
            stream = self._streams[index]
            if stream is not None:
                contexts.enter_context(torch.cuda.stream(stream))  # also makes its device the current one
            return function()
