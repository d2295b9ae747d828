"""Find out whether forked processes can compute with several threads."""

import multiprocessing
import os

import torch

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
    if not _has_failed:
        process = multiprocessing.get_context("fork").Process(target=_compute)
        process.start()
        process.join(_PATIENCE_SECONDS)
        _has_failed = process.exitcode != 0
        if process.exitcode is None:
            process.kill()
            process.join()
    return not _has_failed


def _compute() -> None:
    torch.ones(1 << 20).sum()  # long enough for torch to divide it among threads
    os._exit(0)
