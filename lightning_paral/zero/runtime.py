"""DeepSpeed as a runtime: which release, for which accelerator, on whose process group, and without its chatter."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata

import torch
import torch.distributed as dist
from packaging.version import Version

from lightning_paral._tested_versions import TESTED_VERSIONS, oldest_tested
from lightning_paral.compat.torch.collectives import rename_in
from lightning_paral.errors import ConfigurationError
from lightning_paral.zero.environment import variables_as_before

_LOGGER = "DeepSpeed"
_RANK_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def check_installed() -> None:
    """Raise a `ConfigurationError` if DeepSpeed is missing or too old. Does not import it."""
    try:
        installed = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        raise ConfigurationError(
            "The paral_zero strategies need DeepSpeed, which is not installed: "
            f"pip install 'deepspeed{TESTED_VERSIONS['deepspeed']}'"
        ) from None
    if Version(installed) < Version(oldest_tested("deepspeed")):
        raise ConfigurationError(
            f"The paral_zero strategies need DeepSpeed {oldest_tested('deepspeed')} or later, but {installed} is "
            f"installed: pip install 'deepspeed{TESTED_VERSIONS['deepspeed']}'"
        )


def choose_accelerator(device: torch.device) -> None:
    """Make DeepSpeed use the Trainer's kind of device, whatever else this machine has. Imports it.

    Raises:
        ConfigurationError: DeepSpeed was imported before and has settled on another kind.
    """
    check_accelerator(device)
    with variables_as_before(["DS_ACCELERATOR"]):
        os.environ["DS_ACCELERATOR"] = _kind(device)  # read once, and remembered
        from deepspeed.accelerator import get_accelerator

        get_accelerator()


def _kind(device: torch.device) -> str:
    return "cuda" if device.type == "cuda" else "cpu"


def check_accelerator(device: torch.device) -> None:
    """Check that DeepSpeed can use the Trainer's kind of device. Does not import it.

    Raises:
        ConfigurationError: DeepSpeed was imported before and has settled on another kind.
    """
    wanted = _kind(device)
    settled = _settled_accelerator()
    if settled is not None and settled != wanted:
        raise ConfigurationError(
            f"The Trainer's device is {str(device)!r}, but DeepSpeed was imported before and has settled on "
            f"{settled!r}, for the whole process. Make the Trainer before anything imports deepspeed, or set "
            f"DS_ACCELERATOR={wanted} in the environment."
        )


def _settled_accelerator() -> str | None:
    if "deepspeed.accelerator.real_accelerator" not in sys.modules:
        return None
    chosen = sys.modules["deepspeed.accelerator.real_accelerator"].ds_accelerator
    return None if chosen is None else str(chosen._name)


@contextmanager
def quiet_deepspeed(level: int) -> Iterator[None]:
    """Let DeepSpeed log at `level` and above only. It prints, too; what it prints while importing goes to the log."""
    logger = logging.getLogger(_LOGGER)
    logger.setLevel(level)
    yield
    # Its import sets the level anew.
    logger.setLevel(level)


def rank_variables_as_before() -> AbstractContextManager[None]:
    """Give the environment's variables for launched ranks, which DeepSpeed needs, their old values at the end."""
    # Lightning takes a LOCAL_RANK in the environment for a launcher's, and would start no processes for a next Trainer.
    return variables_as_before(_RANK_VARIABLES)


def join_deepspeed(level: int, device: torch.device) -> None:
    """Let DeepSpeed use the default process group, for `device`. *Collective* over the group."""
    with quiet_deepspeed(level):
        choose_accelerator(device)
        import deepspeed
        from deepspeed.ops import op_builder  # noqa: F401
    # TorchBackend compiles shared-memory collectives for CPU as soon as they could be, used by inference only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.ops.__compatible_ops__["shm_comm"] = False
    leave_deepspeed()
    if dist.get_backend() == "gloo":
        from lightning_paral.zero.gloo import GlooBackend

        deepspeed.comm.comm.cdb = GlooBackend("gloo", deepspeed.comm.comm.default_pg_timeout, None)
    else:
        deepspeed.comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
    rename_in(deepspeed.comm.comm.cdb)
    _agree_on_counters()


def _agree_on_counters() -> None:
    # Stage 3 numbers modules and parameters from counters of the process, and compares the numbers between ranks. Ranks
    # with another past, of a smaller world or a failed run, would not agree.
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init

    (num_modules,) = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    counters = torch.tensor([num_modules[0], Init.param_id], device=device)
    dist.all_reduce(counters, op=dist.ReduceOp.MAX)
    num_modules[0], Init.param_id = counters.tolist()


def leave_deepspeed() -> None:
    """Forget the process groups that DeepSpeed keeps in module globals, which a next run must not meet."""
    if "deepspeed" not in sys.modules:
        return
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import parameter_offload, partition_parameters
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
    from deepspeed.utils import groups

    if hasattr(comm.cdb, "abandon"):
        comm.cdb.abandon()
    comm.cdb = None
    made = (groups._WORLD_GROUP, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, *groups._ALL_TO_ALL_GROUP.values())
    for group in made:
        if group in dist.distributed_c10d._world.pg_map:  # else it went with an earlier default group
            dist.destroy_process_group(group)
    groups._WORLD_GROUP = None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups._ALL_TO_ALL_GROUP = {}
    groups.mesh_device = None
    # Left behind by a failure inside `zero.Init` or a forward.
    partition_parameters.zero_init_context = 0
    partition_parameters.top_level_context = None
    parameter_offload.FWD_MODULE_STACK.clear()
    _restore_linear()
    # A cache of the class, behind a decorator: it would keep every module of stage 3 and its engine alive.
    for cell in PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release.__closure__ or ():
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()
    _forget_autocast()


def _restore_linear() -> None:
    # Stage 3 puts its own in the place of torch's for good. It yields the gradients of weight and bias in another
    # order: in a later run of stage 1 or 2, ranks with that past and ranks without would add up different gradients.
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches

    if torch.nn.functional.linear is zero3_linear_wrap and getattr(Patches, "linear_bk", None) is not None:
        torch.nn.functional.linear = Patches.linear_bk


def _forget_autocast() -> None:
    # DeepSpeed keeps `torch_autocast` in module globals and never resets them: a later fp32 run would be taken for one.
    from deepspeed.runtime import torch_autocast

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
    torch_autocast.TORCH_AUTOCAST_DTYPE = None
