"""DeepSpeed in this process: its version, accelerator, process group, collectives, variables and log level."""

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from packaging.version import Version
from torch import Tensor

from lightning_paral.comm.reduce_scatter import direct_reduce_scatter, start_reduce
from lightning_paral.compat.deepspeed.engine import disable_shared_memory, forget_runs, use_backend
from lightning_paral.compat.private_name import check_names
from lightning_paral.errors import ConfigurationError
from lightning_paral.tested_versions import TESTED_VERSIONS, oldest_tested

_LOGGER = "DeepSpeed"
_RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def check_installed() -> None:
    """Raise a `ConfigurationError` if DeepSpeed is not installed or too old. Does not import it."""
    try:
        installed = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        installed = ""
    if not installed or Version(installed) < Version(oldest_tested("deepspeed")):
        raise ConfigurationError(
            f"The paral_zero strategies need DeepSpeed {oldest_tested('deepspeed')} or later, but "
            f"{installed + ' is' if installed else 'it is not'} installed: "
            f"pip install 'deepspeed{TESTED_VERSIONS['deepspeed']}'"
        )


def choose_accelerator(device: torch.device) -> None:
    """Import DeepSpeed for the type of `device`, even if the node has accelerators of another type.

    Raises:
        ConfigurationError: DeepSpeed was imported before, and uses another device type.
    """
    wanted = "cuda" if device.type == "cuda" else "cpu"
    with restore_variables(["DS_ACCELERATOR"]):
        os.environ["DS_ACCELERATOR"] = wanted  # DeepSpeed reads it once
        from deepspeed.accelerator import get_accelerator

        current = str(get_accelerator().device_name())
    if current != wanted:
        raise ConfigurationError(
            f"The Trainer's device is {str(device)!r}, but DeepSpeed was imported before and uses {current!r} for the "
            "rest of the process. Create the Trainer before anything imports deepspeed, or set "
            f"DS_ACCELERATOR={wanted} in the environment."
        )


@contextmanager
def quiet_deepspeed(level: int) -> Iterator[None]:
    """Set DeepSpeed's log level on entry and again on exit, because importing DeepSpeed resets it."""
    logger = logging.getLogger(_LOGGER)
    logger.setLevel(level)
    yield
    logger.setLevel(level)


@contextmanager
def deepspeed_process_group(
    environment: ClusterEnvironment, ranks: tuple[int, int, int], level: int, device: torch.device
) -> Iterator[None]:
    """Let DeepSpeed use the default process group inside this context. *Collective* over the group.

    DeepSpeed reads the environment variables that a launcher sets, so they are set on entry. They are restored on exit:
    if Lightning finds LOCAL_RANK, it assumes a launcher and starts no processes for the next Trainer.

    Args:
        environment: the cluster environment, which knows the address and port of the main process.
        ranks: the global rank, the world size and the local rank of this process.
        level: the level of `logging` below which DeepSpeed's messages are dropped.
        device: the device of this rank.

    Raises:
        ConfigurationError: DeepSpeed was imported before, and uses another device type.
    """
    with restore_variables(_RANK_VARIABLES):
        values = (environment.main_address, environment.main_port, *ranks)
        os.environ.update(zip(_RANK_VARIABLES, map(str, values), strict=True))
        join_deepspeed(level, device)
        try:
            yield
        finally:
            forget_runs()


def join_deepspeed(level: int, device: torch.device) -> None:
    """Let DeepSpeed use the default process group and `device`. *Collective* over the group.

    Messages of DeepSpeed below `level`, a level of `logging`, are dropped.

    Raises:
        ConfigurationError: DeepSpeed was imported before, and uses another device type.
    """
    with quiet_deepspeed(level):
        choose_accelerator(device)
        import deepspeed
        from deepspeed.ops import op_builder  # noqa: F401

        check_names("deepspeed")
    disable_shared_memory()
    forget_runs()
    if dist.get_backend() == "gloo":
        use_backend(gloo_backend()("gloo", timedelta(0), None))  # the group exists, so the timeout has no effect
    else:
        deepspeed.comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)


@contextmanager
def restore_variables(names: Iterable[str]) -> Iterator[None]:
    """Restore the environment variables `names` on exit."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# DeepSpeed's collectives on gloo, which send as little as in the ZeRO paper

_MAX_GATHERED_BYTES = 25 * 2**20
"""gloo holds a copy of what one call gathers."""


@cache
def gloo_backend() -> type:
    """Return DeepSpeed's `torch.distributed` backend for gloo. All reductions are sums of CPU tensors."""
    from deepspeed.comm.torch import TorchBackend

    class GlooBackend(TorchBackend):  # type: ignore[misc]
        def reduce(self, tensor: Tensor, dst: int, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
            """Sum `tensor` on global rank `dst`. *Collective*."""
            group = group or dist.group.WORLD
            for work in start_reduce(tensor.view(-1), dist.get_group_rank(group, dst), group):
                work.wait()

        def reduce_scatter_tensor(
            self, output_tensor: Tensor, input_tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
        ) -> Any:
            """Write this rank's chunk of the sum of `input_tensor` to `output_tensor`. *Collective*."""
            world: Any = dist.group.WORLD
            direct_reduce_scatter(output_tensor, input_tensor, group or world)

        def all_gather_into_tensor(
            self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
        ) -> Any:
            """Gather `input_tensor` of all ranks into `output_tensor`, of which it may be a part. *Collective*."""
            is_dense = output_tensor.is_contiguous() and input_tensor.is_contiguous()
            if async_op or output_tensor.nbytes <= _MAX_GATHERED_BYTES or not is_dense:
                return super().all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
            _gather_in_pieces(output_tensor, input_tensor, group or dist.group.WORLD)
            return None

    return GlooBackend


def _gather_in_pieces(output: Tensor, own: Tensor, group: Any) -> None:
    """All-gather a large tensor, such as all weights at stages 1 and 2, because gloo copies what it gathers."""
    own = own.view(-1)
    parts = output.view(-1).chunk(dist.get_world_size(group))
    length = -(-own.numel() * _MAX_GATHERED_BYTES // output.nbytes)
    for start in range(0, own.numel(), length):
        piece = slice(start, start + length)
        dist.all_gather([part[piece] for part in parts], own[piece], group)
