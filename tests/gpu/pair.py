"""The checks of two ranks that share a GPU. To the Trainer they are two nodes with one device each."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy, ParalPipelineStrategy, ParalZeROStrategy
from lightning_paral.distributed.process_group import join_process_group
from lightning_paral.options import DEFAULT_TIMEOUT
from tests.contract.cases import BY_LABEL
from tests.gpu import raw_loops, reductions, staged
from tests.gpu.place import check_installed, largest_difference, options_of, trainer_options
from tests.gpu.report import write_json
from tests.gpu.rounding import with_sgd
from tests.models.blocks import GAN
from tests.models.chain import Chain, fit_chain
from tests.models.regression import fit_regression
from tests.models.resumable import fit as fit_resumable
from tests.models.resumable import mean_losses
from tests.models.split_layers import PLAN, SplitLayers
from tests.models.tokens import fit

NUM_RANKS = 2
NUM_STEPS = 20
_JOIN_SECONDS = 60.0


def environments(port: int, name: str) -> list[dict[str, str]]:
    """Return the environment variables of each rank, which make it a separate node, also to NCCL."""
    return [
        {
            "TORCHELASTIC_RUN_ID": name,
            "RANK": str(rank),
            "GROUP_RANK": str(rank),
            "NODE_RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(NUM_RANKS),
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            # NCCL refuses a GPU that it finds twice on one node. This variable names the node.
            "NCCL_HOSTID": f"{name}-{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        for rank in range(NUM_RANKS)
    ]


def root_device(device: str) -> torch.device:
    """Return the device that both ranks use."""
    return torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")


def join(device: str, backend: str, seconds: float | None = None) -> None:
    """Make the default group, unless one exists. *Collective*.

    Args:
        device: `"cuda"` or `"cpu"`.
        backend: `"nccl"`: the group that strategies make by themselves; else a backend, in a group that they join.
        seconds: how long ranks wait for each other; by default the timeout of strategies selected by name.
    """
    if dist.is_initialized():
        return
    timeout = DEFAULT_TIMEOUT if seconds is None else timedelta(seconds=seconds)
    if device == "cuda":
        torch.cuda.set_device(0)
    if backend == "nccl":
        join_process_group(TorchElasticEnvironment(), root_device(device), None, timeout)
        return
    if backend == staged.NAME:
        staged.register()
    dist.init_process_group(backend, timeout=timeout)


def probe(device: str, backend: str, num_bytes: int) -> dict[str, Any]:
    """Measure the seconds to join, to reduce, and to send around a ring of two. *Collective*."""
    facts: dict[str, Any] = {"failures": []}
    place = root_device(device)
    began = time.perf_counter()
    join(device, backend, _JOIN_SECONDS)
    tensor = torch.full((num_bytes // 4,), float(dist.get_rank() + 1), device=place)
    dist.all_reduce(tensor)
    facts["s to join and reduce"] = round(time.perf_counter() - began, 3)
    received = torch.empty_like(tensor)
    other = 1 - dist.get_rank()
    for _ in range(2):
        began = time.perf_counter()
        operations = [dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, received, other)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        total = received.sum().item()
    facts[f"s to pass {num_bytes / 2**20:.1f} MiB on"] = round(time.perf_counter() - began, 4)
    if total != 3.0 * (num_bytes // 4):
        facts["failures"].append(f"what came around sums to {total}, not {3.0 * (num_bytes // 4)}")
    dist.barrier()
    facts["backend"] = dist.get_backend()
    return facts


def parity(label: str, device: str, backend: str) -> dict[str, Any]:
    """Train 20 steps on half of each batch, and compare with one process on the same device. *Collective*."""
    check_installed(label)
    join(device, backend)
    facts: dict[str, Any] = {"failures": []}
    tolerance = BY_LABEL[label].tolerance
    for accumulate in (1, 3):
        losses, weights = fit_regression(NUM_STEPS, accumulate, NUM_RANKS, **options_of(label, device))
        expected_losses, expected = raw_loops.regression(NUM_STEPS, accumulate, device)
        of_ranks: list[Any] = [None] * NUM_RANKS
        dist.all_gather_object(of_ranks, losses)
        mean = torch.tensor(of_ranks, dtype=torch.float64).mean(dim=0)
        off = (mean / torch.tensor(expected_losses, dtype=torch.float64) - 1).abs().max().item()
        found = {"weights": largest_difference(weights, expected), "losses": off}
        for name, value in found.items():
            facts[f"{name}, accumulate={accumulate}"] = value
            if not value <= tolerance:
                facts["failures"].append(
                    f"rank {dist.get_rank()}, accumulate={accumulate}: {name} off by {value:.3g}, not {tolerance:g}"
                )
    return facts


class FrozenStage(Chain):
    """A chain whose first stage has no gradients, which Lightning's clipping asks for on all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:2].requires_grad_(False)


def model_parallel(name: str, device: str, backend: str) -> dict[str, Any]:
    """Train with split layers or stages, and compare with Lightning in one process. *Collective*."""
    join(device, backend)
    facts: dict[str, Any] = {"failures": []}
    make = {"tensor": SplitLayers, "pipeline": Chain, "frozen_stage": FrozenStage}[name]
    options = {key: value for key, value in trainer_options(device).items() if key != "devices"}
    for accumulate in (1, 3):
        split = {
            "tensor": lambda: ParalFSDPStrategy(tensor_parallel=NUM_RANKS, plan=PLAN),
        }.get(name, lambda: ParalPipelineStrategy(micro_batches=2))()
        fits = []
        for strategy, where in (("auto", options | {"num_nodes": 1}), (split, options)):
            torch.manual_seed(3)
            losses, module, _ = fit_chain(strategy, 1, module=make(), accumulate_grad_batches=accumulate, **where)
            fits.append((list(losses.values()), {key: value.cpu() for key, value in module.state_dict().items()}))
        (expected_losses, expected), (found_losses, weights) = fits
        off = max(abs(loss / other - 1) for loss, other in zip(found_losses, expected_losses, strict=True))
        found = {"weights": largest_difference(weights, expected), "losses": off}
        for kind, value in found.items():
            facts[f"{kind}, accumulate={accumulate}"] = value
            if not value <= 1e-5:
                facts["failures"].append(f"accumulate={accumulate}: {kind} off by {value:.3g}")
    return facts


def reduce(algorithm: str, device: str, backend: str, num_bytes: int) -> dict[str, Any]:
    """Check our all-reduce algorithms. *Collective*."""
    join(device, backend)
    return reductions.facts(algorithm, root_device(device), num_bytes)


def cpu_path(device: str, backend: str) -> dict[str, Any]:
    """Exchange CPU tensors and objects in a group whose ranks have GPUs. *Collective*."""
    join(device, backend)
    facts: dict[str, Any] = {"failures": []}
    objects: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(objects, {"rank": dist.get_rank()})
    tensor = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(tensor)
    if objects != [{"rank": 0}, {"rank": 1}] or tensor.item() != 3.0:
        facts["failures"].append(f"objects {objects}, sum {tensor.item()}")
    return facts


def manual_optimization(device: str, backend: str) -> dict[str, Any]:
    """Train a GAN with manual optimization under ZeRO, with and without overlap, and under DDP. *Collective*."""
    check_installed("paral_zero")
    join(device, backend)
    facts: dict[str, Any] = {"failures": []}
    make = with_sgd(GAN)
    _, expected = fit(make, 5, NUM_RANKS, **trainer_options(device), strategy=ParalDDPStrategy())
    for stage, overlap in ((1, True), (1, False), (2, True), (3, True)):
        strategy = ParalZeROStrategy(stage=stage, overlap_comm=overlap)
        _, weights = fit(make, 5, NUM_RANKS, **trainer_options(device), strategy=strategy)
        name, off = f"stage {stage}, overlap_comm={overlap}", largest_difference(weights, expected)
        facts[name] = off
        if not off <= 1e-5:
            facts["failures"].append(f"{name}: weights off by {off:.3g}")
    return facts


def save(label: str, device: str, backend: str, folder: str) -> dict[str, Any]:
    """Train on two ranks and save midway; record the mean losses of the rest of the run. *Collective*."""
    check_installed(label)
    join(device, backend)
    path = Path(folder, label)
    options = {name: value for name, value in options_of(label, device).items() if name != "devices"}
    losses = fit_resumable(world_size=1, save_to=path / "x.ckpt", **options).losses
    of_ranks: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(of_ranks, losses)
    if dist.get_rank() == 0:
        write_json(path / "losses.json", {str(number): loss for number, loss in mean_losses(of_ranks).items()})
    dist.barrier()
    return {"losses": len(losses), "pid": os.getpid()}
