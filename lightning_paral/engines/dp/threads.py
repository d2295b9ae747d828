"""Run replicas concurrently: the first in the caller's thread, each of the others in a thread of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import ExitStack
from typing import Any

import torch


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
