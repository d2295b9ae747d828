"""Replace a checkpoint on a file system without atomic exchange, and stop between the renames: `replaced.py PATH`.

Between the two renames, the process prints `between` and waits until its input is closed.
"""

import os
import sys
from typing import Any

from lightning_paral import ParalDDPStrategy
from lightning_paral.checkpoint import commit
from tests.models.resumable import fit

rename = os.rename


def rename_and_wait(source: Any, target: Any) -> None:
    rename(source, target)
    if str(source) == sys.argv[1]:
        print("between", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    commit.exchange = lambda first, second: False
    os.rename = rename_and_wait
    fit(ParalDDPStrategy(checkpoint="sharded"), 1, save_to=sys.argv[1])
    print("saved", flush=True)
