"""The program of a rank: `python -m lightning_paral.diagnostics.bench.rank_program SPECIFICATION`.

`ranks.py` starts it. The specification is JSON: the port of the store, the process that starts the rank, the name of
the function to call, its arguments, the timeout in seconds and the number of threads.
"""

import importlib
import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_paral.diagnostics.bench.rank import ERROR, NUM_ERRORS, RESULT, Rank
from lightning_paral.errors import ConfigurationError

_POLL_SECONDS = 0.5


def main() -> None:
    """Call the function, and write its result or its error to the store."""
    specification: dict[str, Any] = json.loads(sys.argv[1])
    _end_with(specification["parent"])
    torch.set_num_threads(specification["num_threads"])
    timeout = timedelta(seconds=specification["timeout_seconds"])
    store = dist.TCPStore("127.0.0.1", specification["port"], is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    rank = Rank(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), store=store, timeout=timeout)
    try:
        module, _, name = specification["function"].partition(":")
        result = getattr(importlib.import_module(module), name)(rank, **specification["arguments"])
        store.set(f"{RESULT}/{rank.rank}", json.dumps(result))
    except BaseException as error:
        traceback.print_exc()
        record = {
            "rank": rank.rank,
            "type": type(error).__name__,
            "message": str(error),
            "is_configuration": isinstance(error, ConfigurationError | MisconfigurationException),
        }
        store.set(f"{ERROR}/{store.add(NUM_ERRORS, 1)}", json.dumps(record))
        sys.stderr.flush()
        os._exit(1)  # the other ranks may never answer, and destroying the process group would wait for them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # results are stored; libraries may hold threads that never end


def _end_with(parent: int) -> None:
    """End this process soon after the process `parent` has ended, however it ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="lightning_paral_parent", daemon=True).start()


if __name__ == "__main__":
    main()
