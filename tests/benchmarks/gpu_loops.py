"""One block of training steps on one rank, by a hand-written loop or a strategy: step times and peak memory.

Runs in a process of `tests.gpu.crew`. Steps are timed with CUDA events, so that nothing waits for the GPU.
"""

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

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
from tests.benchmarks.common import differences
from tests.benchmarks.correctness import NAMES
from tests.benchmarks.gpu_models import SIZES, Measured, Network, Size, Tokens, make_optimizer
from tests.gpu.place import check_installed, root_device
from tests.running import quiet_trainer

WARM_UP = 3

Step = Callable[[Tensor], Any]
"""A training step on a batch."""


def _counterpart(name: str) -> str:
    if "zero" in name:
        return f"deepspeed {name[len('paral_zero')]}"
    return {"paral_dp": "torch", "paral_ddp": "torch DDP", "paral_ddp_ring": "torch DDP"}.get(name, "torch fully_shard")


COUNTERPARTS = {name: _counterpart(name) for name in NAMES if name != "paral_fsdp_tp"}  # which needs two devices
"""The hand-written loop with which each strategy is compared."""
CONTESTANTS = (*dict.fromkeys(COUNTERPARTS.values()), *COUNTERPARTS)


class Clock(Callback):
    """Records the ends of steps."""

    def __init__(self, device: str, size: Size) -> None:
        self.device, self.size = device, size
        self._ends: list[Any] = []
        self._began = time.perf_counter()

    def tick(self) -> None:
        """Record the end of a step."""
        if self.device == "cuda":
            self._ends.append(torch.cuda.Event(enable_timing=True))
            self._ends[-1].record()
        else:
            self._ends.append(time.perf_counter())

    def result(self) -> dict[str, Any]:
        """Return the seconds of each step after the first ones, and the peak of memory."""
        if self.device == "cuda":
            torch.cuda.synchronize()
            seconds = [before.elapsed_time(after) / 1e3 for before, after in pairwise(self._ends[WARM_UP - 1 :])]
        else:
            seconds = differences(self._ends, WARM_UP - 1)
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
        total = time.perf_counter() - self._began
        return {"seconds": seconds, "peak_bytes": peak, "parameters": self.size.num_parameters, "total_s": total}

    def on_train_batch_end(self, *_: Any) -> None:
        self.tick()


def measure(name: str, size_name: str, device: str, num_steps: int) -> dict[str, Any]:
    """Train for a block of steps; return the seconds of each step after the warm-up, and peak memory.

    Args:
        name: name of the contestant.
        size_name: key of `SIZES`.
        device: `"cuda"` or `"cpu"`.
        num_steps: number of steps after `WARM_UP`.
    """
    size = SIZES[size_name]
    check_installed(COUNTERPARTS.get(name, name).replace("deepspeed", "paral_zero"))
    gc.collect()  # left by an earlier block
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    clock, batches = Clock(device, size), Tokens(size, WARM_UP + num_steps, root_device(device))
    if name in COUNTERPARTS:
        make_trainer(name, size, device, [clock]).fit(Measured(size), DataLoader(batches, batch_size=None))
    else:
        with _one_rank(root_device(device)):
            _train_by_hand(name, size, root_device(device), batches, clock)
    return clock.result()


def make_trainer(name: str, size: Size, device: str, callbacks: list[Callback], **options: Any) -> Any:
    """Return a Trainer that measures nothing by itself, with the options of the strategy that a size needs."""
    (entry,) = [entry for entry in STRATEGIES if entry.name == name]
    if size.recompute and name != "paral_dp":
        options["activation_checkpointing"] = size.checkpointing
    return quiet_trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        max_epochs=1,
        precision="bf16-mixed",
        strategy=entry.strategy(**entry.arguments, **options),
        callbacks=callbacks,
    )


@contextmanager
def _one_rank(device: torch.device) -> Iterator[None]:
    """Provide a default group of this process alone: that of an earlier fit, or one for this block."""
    makes = not dist.is_initialized()
    with patch.dict(os.environ, {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}):
        if makes:
            store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
            # Not bound to the device, as under the strategies: one rank has nobody to split groups off from.
            dist.init_process_group(backend_for(device), store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            if makes:
                dist.destroy_process_group()


def _train_by_hand(name: str, size: Size, device: torch.device, batches: Tokens, clock: Clock) -> None:
    with device:
        network: Any = Network(size)
    if size.recompute:
        for block in network.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    end: Callable[[], None] = lambda: None  # noqa: E731
    if name.startswith("deepspeed"):
        step, end = _deepspeed(network, device, int(name.split()[1]))
    else:
        step = _torch(name, network, device)
    for batch in batches:
        step(batch)
        clock.tick()
    end()


def _torch(name: str, network: Any, device: torch.device) -> Step:
    if name == "torch DDP":
        network = DistributedDataParallel(network)
    elif name == "torch fully_shard":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in (*network.blocks, network):
            fully_shard(unit, mesh=init_device_mesh(device.type, (1,)), mp_policy=policy)
    optimizer = make_optimizer(network.parameters())

    def step(tokens: Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = network(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _deepspeed(network: Any, device: torch.device, stage: int) -> tuple[Step, Callable[[], None]]:
    from lightning_paral.engines.zero.parameters.snapshot import ModuleSnapshot
    from lightning_paral.engines.zero.runtime import config as settings
    from lightning_paral.engines.zero.runtime import deepspeed as runtime

    runtime.join_deepspeed(level=40, device=device)
    import deepspeed

    snapshot = ModuleSnapshot(network)
    # DeepSpeed's defaults, except for the precision, which is that of our strategies.
    config = settings.complete({"zero_optimization": {"stage": stage}, **settings.precision_section("bf16-mixed")}, {})
    optimizer = make_optimizer(network.parameters())
    engine, *_ = deepspeed.initialize(model=network, optimizer=optimizer, config=config, dist_init_required=False)

    def step(tokens: Tensor) -> None:
        engine.backward(engine(tokens))
        engine.step()

    def end() -> None:
        snapshot.restore(gather=True)
        engine.destroy()
        runtime.leave_deepspeed()

    return step, end
