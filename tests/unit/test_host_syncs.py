"""The counter of waits counts waiting code in the package once, on every thread, and no other code."""

import threading
from collections import Counter
from typing import Any

import torch
from torch import nn

from tests.host_syncs import OURS, HostSyncs

WAIT = (
    *("t[0].item()", "float(t[0])", "int(t[0])", "bool(t[0])", "complex(t[0])", "t.tolist()", "t.numpy()", "1.0 in t"),
    *("f'{t[0]}'", "if t[0]: pass", "max(t[0], t[1])", "range(3)[t[0].long()]", "other[t[0].long()]"),
    *("t.cpu()", "t.to('cpu')", "t.to(device='cpu')", "t.to('cpu', torch.float64, non_blocking=True)"),
    *("t[t > 1]", "t[[True, False, True]]", "t[t > 1] += 1", "torch.where(t > 1)"),
    *("t.nonzero()", "torch.argwhere(t)", "torch.masked_select(t, t > 1)", "t.equal(other)", "t.unique()"),
)
DO_NOT_WAIT = (
    *("t.to(other)", "t.to(torch.float64)", "t.double()", "t.to('meta')", "t[t > 1] = 0", "torch.where(t > 1, t, 0)"),
    *("t[torch.tensor([0, 1])]", "t[0]", "t[:2] = 0", "t.isfinite().all()", "t.copy_(other)", "t.norm()"),
    *("nn.utils.clip_grad_norm_([nn.Parameter(t)], 1.0)", "nn.Linear(3, 3)(t).sum().backward()"),
)


def function_of_the_package(body: str) -> Any:
    module: dict[str, Any] = {"torch": torch, "nn": nn}
    exec(compile(f"def step(t, other):\n    {body}", f"{OURS}made_up.py", "exec"), module)
    return module["step"]


def counted(step: Any, *args: Any) -> Counter[str]:
    syncs = HostSyncs()
    with syncs.watched():
        syncs.is_counting = True
        step(*args)
    assert syncs.num_elsewhere == 0
    return syncs.found


def test_waits_are_counted_once_and_other_calls_are_not() -> None:
    found = {
        body: counted(function_of_the_package(body), torch.tensor([1.0, 2.0, 0.0]), torch.ones(3))
        for body in (*WAIT, *DO_NOT_WAIT)
    }

    assert [body for body in WAIT if found[body].total() != 1] == []
    assert [body for body in DO_NOT_WAIT if found[body]] == []
    assert all(place.startswith("made_up.py: step: ") for places in found.values() for place in places)


def test_reads_on_other_threads_are_counted() -> None:
    def on_a_thread() -> None:
        thread = threading.Thread(target=function_of_the_package("t.item()"), args=(torch.ones(()), None))
        thread.start()
        thread.join()

    assert counted(on_a_thread).total() == 1
