"""Find out what forked processes can compute: with several threads, and gradients."""

import multiprocessing
import os
import warnings
from collections.abc import Callable

import torch

from lightning_paral.errors import ConfigurationError

_PATIENCE_SECONDS = 3.0
_has_failed = False


def can_use_threads_after_fork() -> bool:
    """Return whether a process forked from this one can use OpenMP's threads.

    If this process has used them, for example in a forward pass, a forked process waits forever for threads that exist
    only here: https://github.com/pytorch/pytorch/issues/17199. No interface says whether it has, so try it.
    """
    global _has_failed
    if torch.get_num_threads() == 1:
        return True
    _has_failed = _has_failed or not _succeeds_in_fork(_compute)
    return not _has_failed


def check_backward_after_fork() -> None:
    """Raise a `ConfigurationError` if a process forked from this one cannot compute gradients.

    Depending on the build of torch, it cannot once this process has started the threads of autograd:
    https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork. No interface says whether it has, so try it.
    """
    if not _succeeds_in_fork(_run_backward):
        raise ConfigurationError(
            "This process has trained before, and with this build of torch, ranks that are forked now cannot compute "
            "gradients. Restart the kernel or the interpreter, and begin with the run on several ranks. Otherwise, set "
            "start_method='spawn' with the classes of module and dataset in a file, or put the code into a script, or "
            "set devices=1."
        )


def _succeeds_in_fork(function: Callable[[], None]) -> bool:
    process = multiprocessing.get_context("fork").Process(target=function)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*use of fork.*", category=DeprecationWarning)
        process.start()
    process.join(_PATIENCE_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode == 0


def _compute() -> None:
    torch.ones(1 << 20).sum()  # long enough for torch to divide it among threads
    os._exit(0)


def _run_backward() -> None:
    try:
        torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        os._exit(1)
    os._exit(0)
