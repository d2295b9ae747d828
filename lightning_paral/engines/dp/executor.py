"""Run replicas concurrently: the first in the caller's thread, each other one in its own thread."""

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

    Each call runs with the caller's grad mode, inference mode, autocast state and current stream, which are otherwise
    per thread.

    Args:
        executor: has at least one thread for each call but the first.
        calls: one per replica.
        devices: of the replicas.
        rendezvous: of the replicas; aborted when one of them fails, so that none waits for it.

    Raises:
        BaseException: the error of the first replica that failed, with a note that names it; after all have ended.
    """
    state = _ThreadState(devices)
    outcomes = [executor.submit(_attempt, state, index, calls[index], rendezvous) for index in range(1, len(calls))]
    first = _attempt(None, 0, calls[0], rendezvous)
    results = [first, *(outcome.result() for outcome in outcomes)]
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
    """The per-thread state of torch in the thread that creates this object."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", *(device.type for device in devices)}
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._streams = [torch.cuda.current_stream(device) if device.type == "cuda" else None for device in devices]

    def enter(self, contexts: ExitStack, index: int) -> None:
        """Enter this state in the current thread, on the device of replica `index`, until `contexts` close."""
        contexts.enter_context(torch.inference_mode(self._inference))
        contexts.enter_context(torch.set_grad_enabled(self._grad))
        for kind, dtype, enabled in self._autocast:
            contexts.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=self._cache))
        stream = self._streams[index]
        if stream is not None:
            contexts.enter_context(torch.cuda.stream(stream))  # also makes its device the current one
