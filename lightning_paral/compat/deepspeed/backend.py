"""The backend that runs DeepSpeed's collectives, which is a module-level variable of DeepSpeed."""

from typing import Any

from lightning_paral.compat.private_name import Names
from lightning_paral.compat.torch.collectives import all_gather_single, reduce_scatter_single

NAMES: Names = {
    "deepspeed.comm.comm": {
        "cdb": "run DeepSpeed's collectives through our own backend, and to remove it after a run",
        "default_pg_timeout": "create a backend with the timeout that init_distributed uses",
    },
    "deepspeed.comm.torch.TorchBackend": {
        ".all_gather_function": "call torch's collective under its current name, which raises no warning",
        ".reduce_scatter_function": "call torch's collective under its current name, which raises no warning",
        "reduce": "override it with an implementation for gloo",
        "reduce_scatter_tensor": "override it with an implementation for gloo",
        "all_reduce": "override it with an implementation for gloo",
        "all_gather_into_tensor": "override it with an implementation for gloo",
    },
}


def current_backend() -> Any:
    """Return DeepSpeed's backend, or `None` if it has none."""
    import deepspeed

    return deepspeed.comm.comm.cdb


def make_backend(cls: Any, name: str) -> Any:
    """Return an instance of `cls`, a subclass of `TorchBackend`, for torch's backend `name` and the default group."""
    import deepspeed

    return cls(name, deepspeed.comm.comm.default_pg_timeout, None)


def use_backend(backend: Any) -> None:
    """Make DeepSpeed run its collectives through `backend`; `None` removes the current backend."""
    import deepspeed

    deepspeed.comm.comm.cdb = backend


def use_new_names(backend: Any) -> None:
    """Make `backend` call single-tensor collectives under their current names in torch.

    A filter could not ignore these warnings only where DeepSpeed causes them: torch attributes them to its own file.
    """
    backend.all_gather_function = all_gather_single
    backend.reduce_scatter_function = reduce_scatter_single
