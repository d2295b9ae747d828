"""Running replicas at the same time: the first in the caller's thread, each further one in a thread of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

import torch

from lightning_paral.engines.dp.rendezvous import Meeting, MeetingEndedError


def run_replicas(
    executor: Executor, calls: Sequence[Callable[[], Any]], devices: Sequence[torch.device], meeting: Meeting
) -> list[Any]:
    """Make all `calls` at the same time, one per device, and return their results in order.

    Whether gradients are recorded, inference mode, autocast and the current stream belong to a thread: each call has
    those of the caller.

    Args:
        executor: with at least one thread for each call but the first.
        calls: one per replica.
        devices: of the replicas.
        meeting: of the replicas; ended when one of them fails, so that none waits for it.

    Raises:
        BaseException: what the first replica to fail raised, with a note that says which; after all have ended.
    """
    state = _ThreadState(devices)
    outcomes = [executor.submit(_attempt, state, index, calls[index], meeting) for index in range(1, len(calls))]
    first = _attempt(None, 0, calls[0], meeting)
    results = [first, *(outcome.result() for outcome in outcomes)]
    errors = {index: error for index, (_, error) in enumerate(results) if error is not None}
    causes = {index: error for index, error in errors.items() if not isinstance(error, MeetingEndedError)} or errors
    for index, error in causes.items():
        error.add_note(f"This was raised in replica {index} of {len(calls)} (paral_dp), on {devices[index]}.")
        raise error
    return [result for result, _ in results]


def _attempt(
    state: "_ThreadState | None", index: int, call: Callable[[], Any], meeting: Meeting
) -> tuple[Any, BaseException | None]:
    try:
        with ExitStack() as contexts:
            if state is not None:
                state.enter(contexts, index)
            return call(), None
    except BaseException as error:
        meeting.end()
        return None, error


class _ThreadState:
    """What a thread has for itself, taken from the thread this is made in."""

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
        """Enter this state, in the present thread and on the device of replica `index`, until `contexts` close."""
        contexts.enter_context(torch.inference_mode(self._inference))
        contexts.enter_context(torch.set_grad_enabled(self._grad))
        for kind, dtype, enabled in self._autocast:
            contexts.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=self._cache))
        stream = self._streams[index]
        if stream is not None:
            contexts.enter_context(torch.cuda.stream(stream))  # makes its device the current one, too
