"""One block of training steps on one rank, by a hand-written loop or a strategy: step times and peak memory.

Runs in a process of `tests.gpu.crew`. Steps are timed with CUDA events, so that nothing waits for the GPU.
"""

import gc
import importlib.util
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_paral.distributed.process_group import backend_for
from lightning_paral.registry import STRATEGIES
from tests.benchmarks.correctness import NAMES
from tests.benchmarks.gpu_models import SIZES, Measured, Network, Size, Tokens, make_optimizer
from tests.gpu.crew import Skipped, leave
from tests.gpu.place import check_installed
from tests.running import quiet_trainer

WARM_UP = 3
_LARGE = 1_000_000_000
"""Number of parameters above which a process ends after its block, in place of moving the model to the host."""

Step = Callable[[Tensor], None]
"""A training step on a batch."""


class Clock:
    """Records the ends of steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.ends: list[Any] = []

    def tick(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.ends.append(event)
        else:
            self.ends.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Return the seconds of each step after the first ones."""
        ends = self.ends[WARM_UP - 1 :]
        if self.device.type != "cuda":
            return [after - before for before, after in itertools.pairwise(ends)]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(ends)]


def contestants(device: str) -> list[str]:
    """Return the names of all contestants, hand-written loops first."""
    by_hand = ["torch", "torch DDP", "torch fully_shard", "deepspeed 1", "deepspeed 2", "deepspeed 3"]
    return [*by_hand, *(name for name in NAMES if name != "paral_fsdp_tp")]  # which needs two devices


def counterpart(name: str) -> str:
    """Return the hand-written loop with which a strategy is compared."""
    if "zero" in name:
        return f"deepspeed {name[len('paral_zero')]}"
    return {"paral_dp": "torch", "paral_ddp": "torch DDP", "paral_ddp_ring": "torch DDP"}.get(name, "torch fully_shard")


def measure(name: str, size_name: str, device_type: str, num_steps: int, layers: int = 0) -> dict[str, Any]:
    """Train for a block of steps; return the seconds of each step after the warm-up, and peak memory.

    Args:
        name: name of the contestant.
        size_name: key of `SIZES`.
        device_type: `"cuda"` or `"cpu"`.
        num_steps: number of steps after `WARM_UP`.
        layers: number of layers, in place of that of the size.
    """
    size = SIZES[size_name]
    if layers:
        size = replace(size, num_layers=layers, batch_size=1, recompute=True)
    if "zero" in name or "deepspeed" in name:
        check_installed("paral_zero")
    device = torch.device("cuda", 0) if device_type == "cuda" else torch.device("cpu")
    gc.collect()  # left by an earlier block
    if device_type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    clock = Clock(device)

    def result() -> dict[str, Any]:
        seconds = clock.seconds()
        peak = torch.cuda.max_memory_allocated() if device_type == "cuda" else None
        total = time.perf_counter() - began
        return {"seconds": seconds, "peak_bytes": peak, "parameters": size.num_parameters, "total_s": total}

    try:
        if name.startswith("paral_"):
            _by_strategy(name, size, device, num_steps, clock, result)
        else:
            with _one_rank(device):
                _by_hand(name, size, device, num_steps, clock)
    except torch.OutOfMemoryError as error:
        leave(_out_of_memory(error, size))
    if size.num_parameters >= _LARGE:
        leave(result())
    return result()


@contextmanager
def _one_rank(device: torch.device) -> Iterator[None]:
    """Provide a default group of this process alone: that of an earlier fit, or one for this block."""
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    before = dict(os.environ)
    os.environ.update(variables)
    makes = not dist.is_initialized()
    if makes:
        store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
        # Not bound to the device, as under the strategies: one rank has nobody to split groups off from.
        dist.init_process_group(backend_for(device), store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        if makes:
            dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


def make_strategy(name: str, size: Size, **options: Any) -> Any:
    """Return the strategy of a name, with the options that a size needs."""
    (entry,) = [entry for entry in STRATEGIES if entry.name == name]
    if size.recompute and name != "paral_dp":
        options["activation_checkpointing"] = size.checkpointing
    return entry.strategy(**entry.arguments, **options)


def make_trainer(name: str, size: Size, device: torch.device, callbacks: list[Callback], **options: Any) -> Any:
    """Return a Trainer that measures nothing by itself."""
    return quiet_trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        precision="bf16-mixed",
        strategy=make_strategy(name, size, **options),
        callbacks=callbacks,
    )


class _Ticking(Callback):
    def __init__(self, clock: Clock, at_end: Callable[[], None]) -> None:
        self.clock, self.at_end = clock, at_end

    def on_train_batch_end(self, *_: Any) -> None:
        self.clock.tick()

    def on_train_end(self, *_: Any) -> None:
        self.at_end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, torch.OutOfMemoryError):  # before anything is moved to the host
            leave(_out_of_memory(exception, pl_module.size))


def _out_of_memory(error: BaseException, size: Size) -> dict[str, Any]:
    return {"out_of_memory": "device", "said": str(error)[:300], "parameters": size.num_parameters}


def _by_strategy(
    name: str, size: Size, device: torch.device, num_steps: int, clock: Clock, result: Callable[[], dict[str, Any]]
) -> None:
    def at_end() -> None:
        if size.num_parameters >= _LARGE:
            leave(result())

    trainer = make_trainer(name, size, device, [_Ticking(clock, at_end)])
    trainer.fit(Measured(size), DataLoader(Tokens(size, WARM_UP + num_steps, device), batch_size=None))


def _by_hand(name: str, size: Size, device: torch.device, num_steps: int, clock: Clock) -> None:
    with device:
        network = Network(size)
    if size.recompute:
        for block in network.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    step, end = _LOOPS[name.split()[0] if "deepspeed" in name else name](network, device, name)
    for batch in Tokens(size, WARM_UP + num_steps, device):
        step(batch)
        clock.tick()
    end()


def _torch(network: Any, device: torch.device, name: str) -> tuple[Step, Callable[[], None]]:
    optimizer = make_optimizer(network.parameters())

    def step(tokens: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = network(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: None


def _ddp(network: Any, device: torch.device, name: str) -> tuple[Step, Callable[[], None]]:
    return _torch(DistributedDataParallel(network), device, name)


def _fully_shard(network: Any, device: torch.device, name: str) -> tuple[Step, Callable[[], None]]:
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in network.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(network, mesh=mesh, mp_policy=policy)
    return _torch(network, device, name)


def _deepspeed(network: Any, device: torch.device, name: str) -> tuple[Step, Callable[[], None]]:
    if importlib.util.find_spec("deepspeed") is None:
        raise Skipped("DeepSpeed is not installed")
    from lightning_paral.engines.zero.parameters.snapshot import ModuleSnapshot
    from lightning_paral.engines.zero.runtime import config as settings
    from lightning_paral.engines.zero.runtime import deepspeed as runtime

    runtime.join_deepspeed(level=40, device=device)
    import deepspeed

    stage = int(name.split()[1])
    snapshot = ModuleSnapshot(network)
    # DeepSpeed's defaults, except for the precision, which is that of our strategies.
    config = settings.complete({"zero_optimization": {"stage": stage}, **settings.precision_section("bf16-mixed")}, {})
    optimizer = make_optimizer(network.parameters())
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config, dist_init_required=False)

    def step(tokens: Tensor) -> None:
        engine.backward(engine(tokens))
        engine.step()

    def end() -> None:
        if sum(parameter.numel() for parameter in network.parameters()) < _LARGE:
            snapshot.restore(gather=True)
            engine.destroy()
            runtime.leave_deepspeed()

    return step, end


_LOOPS = {"torch": _torch, "torch DDP": _ddp, "torch fully_shard": _fully_shard, "deepspeed": _deepspeed}
