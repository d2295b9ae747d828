"""One rank of the doctor: `python -m lightning_paral.diagnostics.doctor.rank OPTIONS`, started by `processes`.

It runs the collectives in the given order, each when the process that started it allows, and writes what it took, or
why it failed, to the store of that process. When that process closes the pipe to stdin or ends, this process ends too,
whatever it is doing.
"""

import json
import os
import sys
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from lightning_paral.diagnostics.doctor.collectives import Ranks, measure
from lightning_paral.distributed.process_group import backend_for

START = "start"
"""The name under which ranks report that they have joined the process group."""


def go_key(name: str) -> str:
    """Return the key in the store that lets the ranks begin the collective `name`."""
    return f"go/{name}"


def answer_key(name: str, rank: int) -> str:
    """Return the key in the store of what `rank` says about the collective `name`."""
    return f"answer/{name}/{rank}"


def main() -> None:
    """Run the collectives that the first argument, in JSON, asks for."""
    watch = threading.Thread(target=_end_with_stdin, name="lightning_paral_doctor", daemon=True)
    watch.start()
    options: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    timeout = timedelta(seconds=options["timeout"])
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch's stubs lack it
        "127.0.0.1", options["port"], options["world_size"], False, timeout, wait_for_workers=False
    )
    for name in (START, *options["collectives"]):
        store.wait([go_key(name)], timeout)
        try:
            answer = _join(store, options, timeout) if name == START else measure(name, _ranks(options))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
        store.set(answer_key(name, options["rank"]), json.dumps(answer))
        if "error" in answer:
            break
    watch.join()


def _ranks(options: dict[str, Any]) -> Ranks:
    rank = options["rank"]
    device = torch.device("cuda", rank) if options["device"] == "cuda" else torch.device("cpu")
    return Ranks(rank=rank, world_size=options["world_size"], device=device)


def _join(store: Any, options: dict[str, Any], timeout: timedelta) -> dict[str, Any]:
    ranks = _ranks(options)
    on_cuda = ranks.device.type == "cuda"
    if on_cuda:
        torch.cuda.set_device(ranks.device)
    dist.init_process_group(
        backend_for(ranks.device),
        store=PrefixStore("group", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        device_id=ranks.device if on_cuda and ranks.world_size > 1 else None,
    )
    return {}


def _end_with_stdin() -> None:
    while os.read(0, 1024):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
