"""Choose how the other local ranks are started: run the script again, or start processes of `multiprocessing`."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_paral.compat.torch.sharding_cache import forget_meshes
from lightning_paral.distributed.process_group import owned_group, release_process_group
from lightning_paral.errors import ConfigurationError
from lightning_paral.options import StartMethod

_SET_BY_LAUNCHER = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PYTEST = "a run of pytest"
_TEST_RUNNERS = ("pytest", "py.test", "_jb_pytest_runner.py")


def check_start_method(given: object) -> None:
    """Raise a `ConfigurationError` if `given` is neither a start method of this platform nor `None`."""
    available = multiprocessing.get_all_start_methods()
    if given not in (None, "popen") and given not in available:
        raise ConfigurationError(
            f"start_method={given!r} is not available on {sys.platform}. Choose from: "
            f"{', '.join(map(repr, ['popen', *available]))}."
        )


def why_script_cannot_run_again() -> str | None:
    """Return what this program is, such as `"an interactive session"`, if it cannot be run again; `None` if it can."""
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return "an interactive session"
    if (spec is not None and spec.name.startswith("pytest.")) or Path(file or "").name in _TEST_RUNNERS:
        return _PYTEST
    if spec is None and file in (None, "", "<stdin>"):
        return "code from `python -c` or from standard input"
    return None


def choose_start_method(given: StartMethod | None) -> StartMethod:
    """Return `given`; if it is `None`, `"popen"` in a script, and `"fork"` in a program that cannot be run again.

    Raises:
        ConfigurationError: the program cannot be run again, and `given` is `"popen"` or the platform cannot fork. With
            `"popen"`, pytest runs again from its first test.
    """
    if given not in (None, "popen"):
        return given
    program = why_script_cannot_run_again()
    if program is None or (given == "popen" and program == _PYTEST):
        return "popen"
    if given == "popen":
        raise ConfigurationError(
            f"start_method='popen' starts the other ranks by running the script again, but this is {program}. Leave "
            "start_method out to fork them, or put the code into a script."
        )
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ConfigurationError(
            f"This is {program}, where ranks can be started only by forking, which {sys.platform} does not support. "
            "Put the code into a script and run it, or set Trainer(devices=1)."
        )
    return "fork"


def prepare_to_start(method: StartMethod, device: torch.device) -> None:
    """Check that processes can be started with `method` now. Release a process group of an earlier run.

    Args:
        method: a start method of `multiprocessing`.
        device: the device of the first rank.

    Raises:
        ConfigurationError: CUDA is initialized, or other code has created a process group, and ranks are forked.
    """
    if method == "fork" and device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigurationError(
            "CUDA was initialized in this process before the run, so forked ranks cannot use it. Restart the kernel or "
            "the interpreter. Then, before the first run, do not move anything to a GPU, and call nothing of "
            "torch.cuda but device_count and is_available. Otherwise, set start_method='spawn' with the classes of "
            "module and dataset in a file, or put the code into a script, or set devices=1."
        )
    if owned_group() is not None:
        release_process_group()  # of one rank: a forked process could neither use nor destroy it
    elif dist.is_initialized():
        raise ConfigurationError(
            f"This process has a process group of {dist.get_world_size()} rank(s) that this package did not create, so "
            "it cannot start ranks. Call torch.distributed.destroy_process_group() before the run."
        )
    if method == "fork":
        forget_meshes()  # their process groups: a forked process that destroys one waits for threads that it lacks
        gc.collect()


@contextmanager
def restoring_environment() -> Generator[None, None, None]:
    """Undo, in a program that cannot run again, the variables that Lightning's launcher sets for a single process.

    Otherwise a later Trainer with several devices would wait for ranks that another launcher seems to have started.
    """
    before = {name: os.environ.get(name) for name in _SET_BY_LAUNCHER}
    try:
        yield
    finally:
        if before["LOCAL_RANK"] is None and why_script_cannot_run_again() is not None:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
