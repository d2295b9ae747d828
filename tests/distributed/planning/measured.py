"""Measure the memory of a rank in a step of a real fit."""

import gc
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from lightning_paral import STRATEGIES, ActivationCheckpointing
from tests.models.planned import MODELS, Drawn
from tests.running import quiet_trainer

PAIRS = ((3, 4), (5, 6), (7, 8))
"""Pairs of steps whose peaks are measured."""


class MarkSteps(Callback):
    """Marks pairs of steps for the profiler, and notes the tensors that exist when each begins."""

    def __init__(self) -> None:
        self._mark: Any = None
        self.bytes_before: dict[str, dict[int, int]] = {}
        """By the name of the mark, the bytes of memory by address."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if any(batch_idx == first for first, _ in PAIRS):
            name = f"measured from step {batch_idx}"
            self.bytes_before[name] = _bytes_of_tensors()
            self._mark = record_function(name)
            self._mark.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if any(batch_idx == last for _, last in PAIRS):
            self._mark.__exit__(None, None, None)


def _bytes_of_tensors() -> dict[int, int]:
    """Return the bytes of the memory of all tensors that Python code can reach, by address."""
    gc.collect()
    with torch._C.DisableTorchFunction():  # reading a parameter of ZeRO-3 would gather it
        tensors = [each for each in gc.get_objects() if isinstance(each, Tensor)]
        storages = {}
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
                if tensor.is_leaf and tensor.grad is not None:  # it has no Python object until somebody asks for it
                    storage = tensor.grad.untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
            except (NotImplementedError, RuntimeError):  # it has no storage
                continue
    return storages


def fit(strategy: Any, model: str, batch_size: int, devices: int | None = None, **options: Any) -> Any:
    """Fit for nine steps of a batch; return the Trainer, the marks and the profiler."""
    if devices is None:
        devices = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    mark = MarkSteps()
    make, draw = MODELS[model]
    gc.collect()  # memory of an earlier fit must not be freed while the profiler runs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        torch.manual_seed(0)
        trainer = quiet_trainer(
            max_steps=9, max_epochs=1, devices=devices, strategy=strategy, callbacks=[mark], **options
        )
        trainer.fit(make(), DataLoader(Drawn(draw), batch_size=batch_size))
    return trainer, mark, profiled


def peak_of(mark: MarkSteps, profiled: Any) -> int:
    """Return the bytes of tensors at the peak of a step, without the buckets of DDP, which are C++ code's.

    The profiler does not see what other threads free, and gloo's thread often frees what it has gathered. Memory that
    is allocated at an address therefore replaces what was there, and the smallest peak of several steps is returned.
    """
    nodes = list(_nodes(profiled.profiler.kineto_results.experimental_event_tree()))
    memory = sorted((node for node in nodes if node.tag == _EventType.Allocation), key=lambda node: node.start_time_ns)
    marks = [node for node in nodes if node.name in mark.bytes_before]
    assert len(marks) == len(PAIRS)
    peaks = []
    for each in marks:
        during = [event for event in memory if each.start_time_ns <= event.start_time_ns <= each.end_time_ns]
        peaks.append(_peak(mark.bytes_before[each.name], during))
    return min(peaks)


def _peak(bytes_before: dict[int, int], events: list[Any]) -> int:
    live = dict(bytes_before)
    now = peak = sum(live.values())
    for event in events:
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        now -= live.pop(address, 0)
        if size > 0:
            live[address] = size
            now += size
        peak = max(peak, now)
    return peak


def _nodes(roots: list[Any]) -> Iterator[Any]:
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children


def peak_in_fit(name: str, model: str, batch_size: int, recomputes: bool, options: dict[str, Any]) -> int:
    """Return the peak of this rank in a step under a registered strategy. *Collective*."""
    (entry,) = [entry for entry in STRATEGIES if entry.name == name]
    recomputing = {"activation_checkpointing": ActivationCheckpointing()} if recomputes else {}
    strategy = entry.strategy(**entry.arguments, **recomputing)
    _, mark, profiled = fit(strategy, model, batch_size, **options)
    return peak_of(mark, profiled)
