"""Run replicas concurrently: the first in the caller's thread, each of the others in a thread of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

import torch

from lightning_paral.engines.dp.rendezvous import Rendezvous, RendezvousBrokenError


def run_replicas(
    executor: Executor, calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device], rendezvous: Rendezvous
) -> list[Any]:
    """Run `calls` concurrently, one per device, and return their results in order.

    Each call runs with the caller's grad mode, inference mode, autocast state and current stream, all of which torch
    keeps per thread.

    Args:
        executor: runs all calls except the first; needs a thread for each of them.
        calls: one per replica.
        devices: devices of the replicas.
        rendezvous: aborted when a replica fails, so that the others do not wait for it.

    Raises:
        BaseException: the error of the failed replica with the lowest index, with a note that names the replica.
            Raised after all replicas have ended.
    """
    state = _ThreadState(devices)
    futures = [executor.submit(_attempt, state, index, calls[index], rendezvous) for index in range(1, len(calls))]
    first = _attempt(None, 0, calls[0], rendezvous)
    results = [first, *(future.result() for future in futures)]
    errors = {index: error for index, (_, error) in enumerate(results) if error is not None}
    causes = {index: error for index, error in errors.items() if not isinstance(error, RendezvousBrokenError)} or errors
    for index, error in causes.items():
        error.add_note(f"This was raised in replica {index} of {len(calls)} (paral_dp), on {devices[index]}.")
        raise error
    return [result for result, _ in results]


def _attempt(
    state: "_ThreadState | None", index: int, call: Callable[[], Any], rendezvous: Rendezvous
) -> tuple[Any, BaseException | None]:
    try:
        with ExitStack() as contexts:
            if state is not None:
                state.enter(contexts, index)
            return call(), None
    except BaseException as error:
        rendezvous.abort()
        return None, error


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

    def enter(self, contexts: ExitStack, index: int) -> None:
        """Enter this state in the current thread, on the device of replica `index`, until `contexts` close."""
        contexts.enter_context(torch.inference_mode(self._inference))
        contexts.enter_context(torch.set_grad_enabled(self._grad))
        for device_type, dtype, enabled in self._autocast:
            contexts.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled=self._cache))
        stream = self._streams[index]
        if stream is not None:
            contexts.enter_context(torch.cuda.stream(stream))  # also makes its device the current one
