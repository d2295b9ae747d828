"""Blocks of training steps on this rank, by a strategy or by a hand-written loop on the same engine."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.utils.data import DataLoader, IterableDataset

from examples.gpt import GPT, Block, StandardLibraryData
from lightning_paral import ParalPipelineStrategy
from lightning_paral.comm.reduce_scatter import DirectReduceScatter
from lightning_paral.distributed.process_group import join_process_group
from lightning_paral.engines.pipeline.division import balanced
from lightning_paral.engines.pipeline.options import MICRO_BATCHES_PER_STAGE
from lightning_paral.model.units import choose_units
from lightning_paral.options import DEFAULT_TIMEOUT
from lightning_paral.registry import STRATEGIES
from tests.running import quiet_trainer

WARM_UP = 3
EXAMPLE = "example"
WIDTH, VOCABULARY, CONTEXT = 768, 50304, 1024
DIRECT = "torch fully_shard direct"
"""As `torch fully_shard`, with the reduce-scatter that `paral_fsdp` uses instead of gloo's own."""

INTERLEAVED = "paral_pp_interleaved"
"""`paral_pp` with `schedule="interleaved"`, which has no name of its own."""
TENSOR = "torch parallelize_module"
PIPELINES = {"torch Schedule1F1B": 1, "torch ScheduleInterleaved1F1B": 2}
"""Loops with these schedules, with the number of parts of the chain per stage. As `TENSOR`, for the example only."""


def counterpart(name: str, size: str) -> str:
    """Return the hand-written loop with which a strategy is compared."""
    if "zero" in name:
        return f"deepspeed {name[len('paral_zero')]}"
    loops = {"paral_dp": "torch", "paral_ddp": "torch DDP", "paral_ddp_ring": "torch DDP"}
    if size == EXAMPLE and dist.get_world_size() > 1:
        loops |= {"paral_tp": TENSOR, **dict(zip(("paral_pp", INTERLEAVED), PIPELINES, strict=True))}
    return loops.get(name, "torch fully_shard")


ON_ONE_DEVICE = tuple(
    entry.name
    for entry in STRATEGIES
    if entry.name not in ("paral_auto", "paral_fsdp_tp", "paral_pp_tp", "paral_local_sgd", "paral_diloco")
    and not (entry.name.startswith("paral_zero") and entry.name.endswith(("_offload", "_nvme")))
)


class GPT124M(LightningModule):
    """A GPT of 124 million parameters, of the example's blocks, with embedding and head that share their weight."""

    def configure_model(self) -> None:
        if hasattr(self, "embedding"):
            return
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, num_heads=12) for _ in range(12)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        inputs, targets = batch[:, :-1], batch[:, 1:]
        logits = self.head(self.norm(self.blocks(self.embedding(inputs) + self.positions.weight)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Other implementations than the fused one copy all parameters in a step.
        return torch.optim.AdamW(self.parameters(), lr=1e-4, weight_decay=0.1, fused=True)


class Tokens(IterableDataset[Tensor]):
    """Batches of 16 samples of random tokens, generated on the device on demand."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        while True:
            yield torch.randint(VOCABULARY, (16, CONTEXT + 1), generator=generator, device=self.device)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained."""

    module: LightningModule
    batches: DataLoader[Any]
    precision: Any
    clip: float | None


def make_task(size: str, device: torch.device) -> Task:
    """Return the example of configs/gpt.yaml in fp32, or `GPT124M` in bf16-mixed."""
    torch.manual_seed(0)
    if size == "124M":
        batches = DataLoader(Tokens(device), batch_size=None)
        return Task(module=GPT124M(), batches=batches, precision="bf16-mixed", clip=None)
    data = StandardLibraryData()
    data.setup("fit")
    return Task(module=GPT(), batches=data.train_dataloader(), precision="32-true", clip=1.0)


class Clock(Callback):
    """Records the ends of steps: on CUDA as events, so that nothing waits for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.ends: list[Any] = []

    def tick(self) -> None:
        """Record the end of a step."""
        self.ends.append(torch.cuda.Event(enable_timing=True) if self.is_cuda else time.perf_counter())
        if self.is_cuda:
            self.ends[-1].record()

    def seconds(self) -> list[float]:
        """Return the seconds of each step after the first ones."""
        pairs = pairwise(self.ends[WARM_UP - 1 :])
        if self.is_cuda:
            torch.cuda.synchronize()
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]

    def on_train_batch_end(self, *_: Any) -> None:
        self.tick()


def measure(name: str, size: str, device: torch.device, num_steps: int) -> tuple[list[float], int]:
    """Train for a block of steps. *Collective* over all ranks.

    Args:
        name: a strategy of this package, `INTERLEAVED`, or a hand-written loop: `torch` and what follows, or
            `deepspeed` and a stage.
        size: as in `make_task`.
        device: the device of this rank.
        num_steps: the number of steps after `WARM_UP`.

    Returns:
        The seconds of each step, and the peak of the memory that torch has allocated on a GPU, 0 on CPU.
    """
    gc.collect()  # left by an earlier block
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    task, clock, num_batches = make_task(size, device), Clock(device), WARM_UP + num_steps
    if name.startswith("paral_"):
        trainer = quiet_trainer(
            strategy=ParalPipelineStrategy(schedule="interleaved") if name == INTERLEAVED else name,
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=dist.get_world_size(),
            max_steps=num_batches,
            limit_val_batches=0,
            precision=task.precision,
            gradient_clip_val=task.clip,
            callbacks=[clock],
        )
        trainer.fit(task.module, task.batches)
    else:
        step, end = make_loop(name, task, device)
        for batch in islice(task.batches, num_batches):
            step(move_data_to_device(batch, device))
            clock.tick()
        end()
    return clock.seconds(), torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


class _Step(nn.Module):
    """A module whose forward pass is its `training_step`, as engines need it."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Any:
        return self.module.training_step(batch, 0)


def make_loop(name: str, task: Task, device: torch.device) -> tuple[Callable[[Any], None], Callable[[], None]]:
    """Return a function that trains with a batch, and one that ends the engine."""
    module: Any = task.module
    with device:
        module.configure_model()
    module.to(device)
    module.log = lambda *_, **__: None
    if name.startswith("torch fully_shard"):
        _shard(module, task.precision == "bf16-mixed", name == DIRECT, device)
    if name == TENSOR:
        _split(module, device)
    found = module.configure_optimizers()
    optimizer, schedule = found, lambda: None
    if isinstance(found, dict):
        optimizer, schedule = found["optimizer"], found["lr_scheduler"]["scheduler"].step
    if name == TENSOR:  # torch cannot update both kinds of tensors at once, which is the default on a GPU
        optimizer.param_groups[0]["foreach"] = False
    if name.startswith("deepspeed"):
        train, end = _deepspeed(_Step(module), int(name.split()[1]), task, optimizer, device)
    elif name in PIPELINES:
        train, end = _pipeline(module, PIPELINES[name], task, optimizer, device), lambda: None
    else:
        train, end = _torch(name, _Step(module), task, optimizer, device), lambda: None

    def step(batch: Any) -> None:
        train(batch)
        schedule()

    return step, end


def _shard(module: LightningModule, is_mixed: bool, is_direct: bool, device: torch.device) -> None:
    policy = MixedPrecisionPolicy(*((torch.bfloat16, torch.float32) if is_mixed else (None, None)))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for unit in choose_units(module).bottom_up:
        sharded: Any = fully_shard(unit.module, mesh=mesh, mp_policy=policy)
        if is_direct:
            sharded.set_custom_reduce_scatter(DirectReduceScatter())
    register_fsdp_forward_method(module, "training_step")


def _torch(name: str, step: Any, task: Task, optimizer: Any, device: torch.device) -> Callable[[Any], None]:
    is_mixed, forward = task.precision == "bf16-mixed", step
    if name == "torch DDP":
        forward = DistributedDataParallel(step)

    def train(batch: Any) -> None:
        with loss_parallel() if name == TENSOR else nullcontext():
            with torch.autocast(device.type, torch.bfloat16) if is_mixed else nullcontext():
                loss = forward(batch)
            optimizer.zero_grad()
            loss.backward()
        if name == TENSOR:
            _clip(step.parameters(), task.clip, lambda parameter: isinstance(parameter, DTensor))
        elif task.clip:
            torch.nn.utils.clip_grad_norm_(step.parameters(), task.clip)
        optimizer.step()

    return train


def _split(module: Any, device: torch.device) -> None:
    """Split the layers of the example that `paral_tp` splits."""
    num_ranks = dist.get_world_size()
    for block in module.blocks:
        block.num_heads //= num_ranks
        weight = block.query_key_value.weight.data
        # A rank gets consecutive rows: those of the queries, the keys and the values of its heads.
        weight.copy_(weight.unflatten(0, (3, num_ranks, -1)).transpose(0, 1).flatten(0, 2))
    plan = {
        "byte_embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.query_key_value": ColwiseParallel(),
        "blocks.*.attention_out": RowwiseParallel(),
        "blocks.*.feed_forward.1": ColwiseParallel(),
        "blocks.*.feed_forward.3": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(module, init_device_mesh(device.type, (num_ranks,)), plan)


def _clip(parameters: Iterable[Any], clip: Any, is_divided: Callable[[Any], bool]) -> None:
    """Clip gradients, of which ranks have different ones or different parts if `is_divided`, by the norm of all."""
    found = [each for each in parameters if each.grad is not None]
    divided, whole = [each for each in found if is_divided(each)], [each for each in found if not is_divided(each)]
    gradients = [each.grad.to_local() if isinstance(each, DTensor) else each.grad for each in divided]
    square = get_total_norm(gradients).square()
    dist.all_reduce(square)
    norm = (square + get_total_norm([each.grad for each in whole]).square()).sqrt()
    for some in (divided, whole):  # torch cannot scale both kinds of tensors at once
        clip_grads_with_norm_(some, clip, norm)


class _Embedding(nn.Module):
    """What the example computes before its blocks."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.bytes, self.positions = module.byte_embedding, module.position_embedding

    def forward(self, inputs: Tensor) -> Any:
        return self.bytes(inputs) + self.positions(torch.arange(inputs.shape[1], device=inputs.device))


def _pipeline(
    module: Any, parts_per_stage: int, task: Task, optimizer: Any, device: torch.device
) -> Callable[[Any], None]:
    """Divide the blocks of the example as `paral_pp` does; the embeddings are on the first stage, the head on the last.

    The optimizer skips the parameters of other stages, which have no gradients.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    cut = balanced([1] * len(module.blocks), num_ranks * parts_per_stage)
    parts = [[module.blocks[number] for number in part] for part in cut]
    parts[0].insert(0, _Embedding(module))
    parts[-1] += [module.norm, module.head]
    own = range(rank, len(parts), num_ranks)
    stages: Any = [PipelineStage(nn.Sequential(*parts[number]), number, len(parts), device) for number in own]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    num_micro_batches = MICRO_BATCHES_PER_STAGE * num_ranks
    schedule: Any
    if parts_per_stage == 1:
        schedule = Schedule1F1B(stages[0], num_micro_batches, loss_of)
    else:
        schedule = ScheduleInterleaved1F1B(stages, num_micro_batches, loss_of)

    def train(batch: Any) -> None:
        inputs, targets = batch
        optimizer.zero_grad()
        to_first = (inputs,) if stages[0].is_first else ()
        schedule.step(*to_first, target=targets if stages[-1].is_last else None, return_outputs=False)
        _clip(module.parameters(), task.clip, lambda _: True)
        optimizer.step()

    return train


def _deepspeed(
    step: Any, stage: int, task: Task, optimizer: Any, device: torch.device
) -> tuple[Callable[[Any], None], Callable[[], None]]:
    from lightning_paral.compat.deepspeed.engine import forget_runs
    from lightning_paral.engines.zero import options as settings
    from lightning_paral.engines.zero import process as runtime
    from lightning_paral.engines.zero.partition import ModuleSnapshot

    runtime.join_deepspeed(level=40, device=device)
    import deepspeed

    snapshot, section = ModuleSnapshot(step), {"stage": stage}
    if device.type == "cpu":  # on a GPU DeepSpeed's defaults, except for the precision
        num_elements = sum(parameter.numel() for parameter in step.parameters())
        section = settings.add_device_defaults(
            section, stage, num_elements, device_type="cpu", num_ranks=dist.get_world_size()
        )
    autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    mixed = {"torch_autocast": autocast} if task.precision == "bf16-mixed" else {}
    config = settings.complete({"zero_optimization": section, "gradient_clipping": task.clip or 0.0, **mixed}, {})
    engine, *_ = deepspeed.initialize(model=step, optimizer=optimizer, config=config, dist_init_required=False)

    def train(batch: Any) -> None:
        engine.backward(engine(batch))
        engine.step()

    def end() -> None:
        snapshot.restore(gather=True)
        engine.destroy()
        forget_runs()

    return train, end


def join(device: torch.device) -> None:
    """Create the default group of the ranks that torchrun has started, as the strategies do. *Collective*."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    join_process_group(TorchElasticEnvironment(), device, None, DEFAULT_TIMEOUT)
