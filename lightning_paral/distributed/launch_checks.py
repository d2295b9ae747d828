"""Check ranks, devices and ports before processes are started or join a process group."""

import os
import socket

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_paral.errors import ConfigurationError

_SIZES = {
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "Install mpi4py, with which Lightning reads the ranks of MPI"),
    "PMI_SIZE": ("mpiexec", "Install mpi4py, with which Lightning reads the ranks of MPI"),
    "MV2_COMM_WORLD_SIZE": ("mpirun", "Install mpi4py, with which Lightning reads the ranks of MPI"),
    "SLURM_STEP_NUM_TASKS": (
        "srun",
        "If SLURM_JOB_NAME is bash or interactive, for which Lightning ignores SLURM, choose another --job-name",
    ),
    "JSM_NAMESPACE_SIZE": ("jsrun", "Set LSB_JOBID, LSB_DJOB_RANKFILE and JSM_NAMESPACE_LOCAL_RANK, as LSF does"),
}
"""Environment variables with the number of processes that a launcher started; the launcher; what to do."""

_OTHERWISE = ", or pass a ClusterEnvironment in Trainer(plugins=...)."


def check_environment(environment: ClusterEnvironment) -> None:
    """Check that the ranks and the address of rank 0 are known.

    Raises:
        ConfigurationError: an environment variable is missing or has a wrong value, or a launcher started several
            processes, each of which would train alone.
    """
    if not environment.creates_processes_externally:
        _check_alone(environment)
        return
    for name in ("world_size", "global_rank", "local_rank", "node_rank"):
        _read(environment, name)
    for name in ("main_address", "main_port"):
        _read(environment, name)


def check_ranks(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> None:
    """Check that the ranks fit together and fit the Trainer, after they were set.

    Raises:
        ConfigurationError: the rank is not below the world size, or the world size differs from that of the Trainer.
    """
    name, rank, world_size = type(environment).__name__, environment.global_rank(), environment.world_size()
    if type(environment).validate_settings is not ClusterEnvironment.validate_settings:
        return  # Lightning compares them before it launches
    if world_size != num_devices * num_nodes:
        raise ConfigurationError(
            f"{name} has {world_size} processes, but Trainer(devices={num_devices}, num_nodes={num_nodes}) needs "
            f"{num_devices * num_nodes}. Start as many processes as devices, or change devices or num_nodes."
        )
    if not 0 <= rank < world_size:
        raise ConfigurationError(f"{name} has {world_size} processes, but says that this one is rank {rank}.")


def check_device(device: torch.device) -> None:
    """Raise a `ConfigurationError` if `device` does not exist or torch.distributed has no backend for it."""
    if device.type not in ("cpu", "cuda"):
        raise ConfigurationError(
            f"lightning_paral trains on CPU and CUDA, but the accelerator selected {str(device)!r}, for which "
            "torch.distributed has no backend. Set `accelerator='cpu'` or `accelerator='gpu'` on a CUDA machine."
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(
            f"This rank was assigned {device}, but only {torch.cuda.device_count()} CUDA device(s) are visible to it. "
            "Lower `devices`, or check CUDA_VISIBLE_DEVICES."
        )


def check_local_rank(local_rank: int, num_devices: int) -> None:
    """Raise a `ConfigurationError` if this node runs more processes than the Trainer has devices."""
    if local_rank >= num_devices:
        raise ConfigurationError(
            f"This process was started as local rank {local_rank}, but Trainer(devices=...) gives this node "
            f"{num_devices} device(s). Start as many processes per node as devices, or set devices={local_rank + 1} or "
            "more."
        )


def check_port_is_free(environment: ClusterEnvironment) -> None:
    """Raise a `ConfigurationError` if rank 0, which starts on this node, cannot listen on MASTER_PORT."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", environment.main_port))
        except OSError as error:
            raise ConfigurationError(
                f"Cannot listen on MASTER_PORT={environment.main_port}: {error.strerror}. Another run may be using the "
                "port. Choose a free one, or unset MASTER_PORT to let Lightning choose one."
            ) from None


def _read(environment: ClusterEnvironment, name: str) -> None:
    who = type(environment).__name__
    try:
        value = getattr(environment, name)
        if callable(value):
            value()
    except KeyError as error:
        raise ConfigurationError(
            f"{who} reads {name} from the environment variable {error.args[0]}, which is not set. Start the script "
            f"with the launcher that sets it, or set it for every process{_OTHERWISE}"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"{who} cannot tell {name} of this process: {error}{_given(str(error))}") from error


def _given(message: str) -> str:
    """Return which environment variables have the value that `message` quotes."""
    names = [f"{name}={value!r}" for name, value in sorted(os.environ.items()) if repr(value) in message]
    return f" ({', '.join(names)} in the environment)." if names else ""


def _check_alone(environment: ClusterEnvironment) -> None:
    """Raise a `ConfigurationError` if a launcher started several processes, but the environment knows of one."""
    if type(environment) is not LightningEnvironment:
        return
    for variable, (launcher, remedy) in _SIZES.items():
        size = os.environ.get(variable, "1")
        if size.isdecimal() and int(size) > 1:
            raise ConfigurationError(
                f"{launcher} started {size} processes ({variable}={size}), but Lightning does not recognize it, so "
                f"each process would train alone. {remedy}{_OTHERWISE}"
            )
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        raise ConfigurationError(
            f"RANK={os.environ['RANK']} and WORLD_SIZE={os.environ['WORLD_SIZE']} are set, but LOCAL_RANK is not, so "
            "each process would train alone. Set LOCAL_RANK as torchrun does. For the PyTorchJob of Kubeflow, with one "
            "process per pod, pass Trainer(plugins=[KubeflowEnvironment()])."
        )
