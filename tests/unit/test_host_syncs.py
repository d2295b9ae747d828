"""The counter of waits counts all forms of waiting code in the package, and no other code."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.host_syncs import OURS, HostSyncs

MODULE = """
import torch
from torch import nn
HOST = torch.device("cpu")

def step(t, other, device):
    {}
"""

WAIT = (
    *("t[0].item()", "float(t[0])", "int(t[0])", "bool(t[0])", "complex(t[0])", "t.tolist()", "t.numpy()", "1.0 in t"),
    *("f'{t[0]}'", "if t[0]: pass", "max(t[0], t[1])", "range(3)[t[0].long()]", "other[t[0].long()]"),
    *("t.cpu()", "t.to('cpu')", "t.to('cpu:0')", "t.to(device='cpu')", "t.to('cpu', torch.float64, non_blocking=True)"),
    *("t.to(torch.device('cpu'))", "t.to(device=torch.device('cpu'))", "t.to(torch.device('cpu', 0), torch.float64)"),
    *("t.to(HOST)", "host = torch.device('cpu'); t.to(device=host)", "nn.Linear(2, 2).to(torch.device('cpu'))"),
    *("nn.Linear(2, 2).cpu()", "nn.Linear(2, 2).to('cpu')"),
    *("t[t > 1]", "t[(t > 1).byte()]", "t[[True, False, True]]", "t[t > -1] = other", "t[t > 1] += 1"),
    *("t.index_put_((t > -1,), other)", "t.index_put((t > 1,), torch.ones(1), accumulate=True)"),
    *("torch.where(t > 1)", "t.nonzero()", "torch.nonzero(t)", "torch.argwhere(t)", "t.argwhere()"),
    *("t.masked_select(t > 1)", "torch.masked_select(t, t > 1)", "t.equal(other)", "torch.equal(t, other)"),
    *("torch.allclose(t, other)", "t.unique()", "torch.unique(t, dim=0)", "t.unique_consecutive()"),
    *("t.long().bincount()", "torch.repeat_interleave(t, t.long())", "torch.linalg.inv(torch.eye(2))"),
    *("torch.ops.aten._local_scalar_dense(t[0])", "torch.sparse_coo_tensor([[0, 0, 0]], t, (1,)).coalesce()"),
)
DO_NOT_WAIT = (
    *("t.to(device)", "t.to(device=device, dtype=torch.float64)", "t.to(other.device, non_blocking=True)"),
    *("t.to(other)", "t.to(torch.float64)", "t.double()", "t.to('meta')", "t.to('meta'); t.to(dtype=torch.bfloat16)"),
    *("t[t > 1] = 0", "t.masked_fill_(t > 1, 0)", "torch.where(t > 1, t, other)", "torch.where(t > 1, t, 0)"),
    *("t[torch.tensor([0, 1])]", "t[0]", "t[:2] = 0", "t[torch.tensor([0, 1])] = 1", "t.index_select(0, t.long())"),
    *("torch.repeat_interleave(t, 2)", "torch.repeat_interleave(t, t.long(), output_size=3)"),
    *("torch.linalg.inv_ex(torch.eye(2))", "t.isfinite().all()", "torch.maximum(t[0], t[1])", "t.clamp(max=other)"),
    *("t.copy_(other)", "t.clone()", "t.shape[0] == len(other)", "torch.eq(t, other).all()", "t.norm()"),
    *("nn.Linear(2, 2).to(device)", "nn.utils.clip_grad_norm_([nn.Parameter(t)], 1.0)"),
    *("nn.Linear(3, 3)(t).sum().backward()", "torch.optim.SGD([nn.Parameter(t)], lr=0.1).step()"),
)


def function_of_the_package(body: str) -> Any:
    module: dict[str, Any] = {}
    exec(compile(MODULE.format(body), f"{OURS}made_up.py", "exec"), module)
    return module["step"]


def counted(step: Any, *args: Any) -> Counter[str]:
    syncs = HostSyncs()
    with syncs.watched():
        syncs.is_counting = True
        step(*args)
    assert syncs.num_elsewhere == 0
    return syncs.found


def arguments() -> tuple[Tensor, Tensor, torch.device]:
    return torch.tensor([1.0, 2.0, 0.0]), torch.ones(3), torch.device("cpu")


def test_waits_are_counted_and_other_calls_are_not() -> None:
    found = {body: counted(function_of_the_package(body), *arguments()) for body in (*WAIT, *DO_NOT_WAIT)}

    assert [body for body in WAIT if not found[body]] == []
    assert [body for body in DO_NOT_WAIT if found[body]] == []
    assert all(place.startswith("made_up.py: step: ") for places in found.values() for place in places)


def test_each_wait_is_counted_once() -> None:
    body = "float(t[0]); t.to('cpu', torch.float64); t.nonzero(); torch.allclose(t, other); t[t > 1]; f'{t[0]}'"
    found = counted(function_of_the_package(body), *arguments())

    prefix = "made_up.py: step: "
    names = {"__float__": 1, "to": 1, "nonzero": 1, "allclose": 1, "index": 1, "item": 1}
    assert found == {prefix + name: count for name, count in names.items()}


@pytest.mark.parametrize("body", ["t.item()", "torch.where(t > 1)"])
def test_waits_in_a_backward_pass_and_on_other_threads_are_counted(body: str) -> None:
    step = function_of_the_package(body)
    x = torch.ones((), requires_grad=True)
    leaf = nn.Parameter(torch.ones(()))
    leaf.register_post_accumulate_grad_hook(lambda parameter: step(parameter, None, None))
    x.register_hook(lambda gradient: step(gradient, None, None))
    (found,) = counted(lambda: (x * leaf).backward()).values()
    assert found == 2

    def recomputed(value: Tensor) -> Tensor:
        step(value.detach(), None, None)
        return value.square()

    (found,) = counted(lambda: checkpoint(recomputed, x, use_reentrant=False).backward()).values()
    assert found == 3  # including the hook of x

    def on_threads() -> None:
        thread = threading.Thread(target=step, args=(torch.ones(()), None, None))
        thread.start()
        thread.join()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(step, torch.ones(()), None, None).result()

    (found,) = counted(on_threads).values()
    assert found == 2
