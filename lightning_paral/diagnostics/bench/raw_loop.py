"""A training step as a hand-written loop, without Lightning's: DistributedDataParallel, fully_shard or DeepSpeed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_paral.diagnostics.bench.rank import Rank
from lightning_paral.diagnostics.bench.raw_zero import RAW_ZERO, building_in_shards, make_zero_step
from lightning_paral.diagnostics.bench.task import Task
from lightning_paral.engines.fsdp.gloo import DirectReduceScatter
from lightning_paral.errors import ConfigurationError
from lightning_paral.model.units import choose_units
from lightning_paral.planning.fake_trainer import PlanningTrainer, attach
from lightning_paral.planning.settings import StepSettings

RAW_FSDP_DIRECT = "raw_fsdp_direct"
"""As `raw_fsdp`, with the reduce-scatter that `paral_fsdp` uses instead of gloo's own."""
RAW = ("raw_ddp", "raw_fsdp", RAW_FSDP_DIRECT, *RAW_ZERO)
_PRECISIONS = {
    "32-true": torch.float32,
    "32": torch.float32,
    32: torch.float32,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.float32,
}

OnBatch = Callable[[Any], bool]
"""A function that is called with the batch after each step, and returns whether to go on."""


class _TrainingStep(torch.nn.Module):
    """The module, with `training_step` as its forward pass, which is what DistributedDataParallel wraps."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any, batch_idx: int) -> Any:
        return self.module.training_step(batch, batch_idx)


def run_raw_loop(
    rank: Rank,
    name: str,
    task: Task,
    device: torch.device,
    on_batch: OnBatch,
    *,
    before_first: Callable[[], None] | None = None,
    builds_sharded: bool = False,
) -> None:
    """Train until `on_batch` returns false. *Collective* over all ranks.

    Args:
        rank: this rank.
        name: a name from `RAW`.
        task: what to train.
        device: the device of this rank.
        on_batch: called after each step.
        before_first: called before the first step.
        builds_sharded: whether `raw_fsdp` and `raw_zero3` build what `configure_model` creates without ever holding
            all of it. Under `raw_fsdp`, the weights are then random, and buffers are zero.

    Raises:
        ConfigurationError: the module needs Lightning's loops: manual optimization, several optimizers, or a
            precision with scaling of gradients.
    """
    options, module = task.trainer_options, task.module
    precision = options.get("precision") or "32-true"
    if not module.automatic_optimization:
        raise ConfigurationError(f"{type(module).__name__} optimizes manually, which a hand-written loop cannot call.")
    if precision not in _PRECISIONS:
        raise ConfigurationError(
            f"precision={precision!r}: the hand-written loops know {', '.join(map(str, _PRECISIONS))}."
        )
    # `configure_optimizers` may ask the Trainer for the number of steps.
    attach(module, PlanningTrainer(StepSettings(precision=str(precision))), task.data)
    rank.join_group("nccl" if device.type == "cuda" else "gloo")
    if task.data is not None and rank.rank == 0:
        task.data.prepare_data()
    dist.barrier()
    loader = _distributed(task.make_loader(), rank)
    building: AbstractContextManager[Any] = nullcontext()
    if builds_sharded and name == "raw_fsdp":
        building = torch.device("meta")
    elif builds_sharded and name == "raw_zero3":
        building = building_in_shards(device, rank.world_size)
    with building:
        module.configure_model()
    if not any(parameter.is_meta for parameter in module.parameters()):
        module.to(device=device, dtype=_PRECISIONS[precision])
    else:
        module.to(dtype=_PRECISIONS[precision])
    train, schedulers = _make_step(name, module, options, rank.world_size, device)
    module.train()
    for number, batch in enumerate(_endless(loader)):
        if number == 0 and before_first is not None:
            before_first()
        batch = move_data_to_device(batch, device)
        train(batch, number)
        for scheduler in schedulers:
            scheduler.step()
        if not on_batch(batch):
            return


def _make_step(
    name: str, module: Any, options: dict[str, Any], world_size: int, device: torch.device
) -> tuple[Callable[[Any, int], None], list[Any]]:
    """Return a function that trains with a batch and its number, and the schedulers that step after each."""
    precision = options.get("precision") or "32-true"
    clip, by_value = options.get("gradient_clip_val") or 0.0, options.get("gradient_clip_algorithm") == "value"
    if name in RAW_ZERO:
        if precision not in ("32-true", "32", 32) or (clip and by_value):
            raise ConfigurationError(
                f"{name}: the hand-written DeepSpeed loop trains in fp32 and clips by norm, but the configuration has "
                f"precision={precision!r} and gradient_clip_algorithm={options.get('gradient_clip_algorithm')!r}."
            )
        optimizer, schedulers = _configured(module)
        wrapped = _TrainingStep(module)
        return make_zero_step(name, wrapped, optimizer, clip=clip, world_size=world_size, device=device), schedulers
    forward = _wrap(name, module, device)
    optimizer, schedulers = _configured(module)

    def train(batch: Any, number: int) -> None:
        with _autocast(precision, device):
            output = forward(batch, number)
        loss: Tensor = output["loss"] if isinstance(output, dict) else output
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        if clip and by_value:
            torch.nn.utils.clip_grad_value_(module.parameters(), clip)
        elif clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()

    return train, schedulers


def _wrap(name: str, module: Any, device: torch.device) -> Callable[[Any, int], Any]:
    if name == "raw_ddp":
        return DistributedDataParallel(_TrainingStep(module), device_ids=[device] if device.type == "cuda" else None)
    if name == RAW_FSDP_DIRECT and device.type == "cuda":
        raise ConfigurationError(
            "raw_fsdp_direct replaces gloo's reduce-scatter, which is not used on GPUs. Name raw_fsdp instead."
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(dist.group.WORLD),))
    for unit in choose_units(module).bottom_up:
        sharded: Any = fully_shard(unit.module, mesh=mesh)
        if name == RAW_FSDP_DIRECT:
            sharded.set_custom_reduce_scatter(DirectReduceScatter())
    _materialize(module, device)
    register_fsdp_forward_method(module, "training_step")
    step: Callable[[Any, int], Any] = module.training_step
    return step


def _materialize(module: torch.nn.Module, device: torch.device) -> None:
    """Replace shards on the meta device by random ones, and buffers there by zeros."""
    tensors = [*module.parameters(), *module.buffers()]
    meta = [tensor for tensor in tensors if tensor.is_meta]
    if not meta:
        return
    if len(meta) < len(tensors):
        raise ConfigurationError(
            f"{type(module).__name__} creates tensors both in __init__ and in configure_model. The hand-written loop "
            "takes one of them. Leave raw_fsdp out."
        )
    module.to_empty(device=device)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for buffer in module.buffers():
        buffer.zero_()


def _autocast(precision: Any, device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16-mixed" else nullcontext()


def _configured(module: Any) -> tuple[Optimizer, list[Any]]:
    """Return the optimizer and the schedulers that step after each batch."""
    found = module.configure_optimizers()
    schedulers: list[Any] = []
    if isinstance(found, dict):
        found, schedulers = found["optimizer"], [found["lr_scheduler"]] if "lr_scheduler" in found else []
    elif isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], list | tuple):
        found, schedulers = found[0], list(found[1])
    if isinstance(found, list | tuple) and len(found) == 1:
        found = found[0]
    if not isinstance(found, Optimizer):
        raise ConfigurationError(
            f"configure_optimizers of {type(module).__name__} returned {type(found).__name__}, but a hand-written loop "
            "needs one optimizer. Leave the raw strategies out."
        )
    each_batch = [entry for entry in schedulers if isinstance(entry, dict) and entry.get("interval") == "step"]
    return found, [entry["scheduler"] for entry in each_batch]


def _distributed(loader: Any, rank: Rank) -> Any:
    """Return a loader for this rank's batches; `loader` itself if it is not one of torch's with batches by number."""
    if (
        not isinstance(loader, DataLoader)
        or loader.batch_size is None
        or isinstance(loader.dataset, IterableDataset)
        or rank.world_size == 1
    ):
        return loader
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, num_replicas=rank.world_size, rank=rank.rank, shuffle=False
    )
    return DataLoader(
        loader.dataset,
        batch_size=loader.batch_size,
        sampler=sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        persistent_workers=loader.persistent_workers,
    )


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise ConfigurationError("The training dataloader has no batches.")
