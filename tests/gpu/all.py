"""Check every strategy on one rank with one GPU, in ten minutes.

    python -m tests.gpu.all [--only NAME,...] [--device cpu|cuda] [--out DIR]

`paral doctor` prints the versions and devices of the machine.

Prints a line as each check ends, and a table at the end. Writes DIR/all.json, which is valid at any time, and
DIR/all.md. A check that fails, crashes or hangs does not stop the others. The exit code is 1 if any failed. `--list`
shows the names; `--only` takes prefixes, so that `--only fit,sync` runs `fit:paral_ddp` and so on.
"""

import sys
from collections.abc import Sequence

from tests.gpu.crew import alone
from tests.gpu.place import ONE_RANK
from tests.gpu.program import Check, main, of_labels
from tests.gpu.saved import ASYNC

STRATEGIES = tuple(label for label in ONE_RANK if label.startswith("paral_"))
SAVED = ("paral_ddp", "paral_fsdp_offload", "paral_zero3")
"""Strategies whose checkpoints every strategy resumes from, besides its own."""
MODULES = ("paral_ddp", "paral_fsdp", "paral_fsdp_offload", "paral_zero2", "paral_zero3", "paral_dp")


def checks(device: str, folder: str) -> list[Check]:
    """Return all checks, the most important first."""
    resumed = [
        check
        for label in STRATEGIES
        # The checkpoints that it resumes from may be saved late.
        for check in of_labels(
            "resume", "saved:resume", [label], device, folder, list(dict.fromkeys([*SAVED, label])), budget=120
        )
    ]
    return [
        *of_labels("fit", "numbers:parity", ONE_RANK, device),
        *of_labels("sync", "syncs:waits", STRATEGIES, device),
        *of_labels("precision", "numbers:precisions", STRATEGIES, device, budget=90),
        *of_labels("clip", "numbers:clipping", STRATEGIES, device),
        *of_labels("memory", "memory:left_behind", STRATEGIES, device),
        Check("activation_offload", "memory:activation_offload", (device,), 120),
        Check("backend", "numbers:named_backend", (device,)),
        *of_labels("async", "saved:async_save", ASYNC, device, folder),
        *of_labels("save", "saved:save", STRATEGIES, device, folder),
        *resumed,
        *of_labels("modules", "numbers:modules", MODULES, device, budget=120),
        Check("manual_optimization", "numbers:manual_optimization", (device,), 90),
        Check("replicas:logged", "evaluation:of_replicas", (device,)),
        *of_labels("replicas", "evaluation:precision_of_replicas", ("bf16-mixed", "bf16-true"), device),
        *(_on_gpu_only(device, folder) if device == "cuda" else ()),
    ]


def _on_gpu_only(device: str, folder: str) -> list[Check]:
    return [
        *of_labels("replicas", "evaluation:precision_of_replicas", ("16-mixed",), device),
        Check("nvme_without_toolkit", "numbers:nvme_without_toolkit", (device, folder), 300, operators=True),
    ]


def run(arguments: Sequence[str] | None = None) -> int:
    return main("all", __doc__, arguments, checks, {"single": alone})


if __name__ == "__main__":
    sys.exit(run())
