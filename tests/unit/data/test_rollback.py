"""A padding step leaves the state of a module bit-identical."""

import contextlib
import copy
import random
from collections import Counter, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryStatScores

from lightning_paral.data.rollback import rollback_side_effects


class Stateful(nn.Module):
    """Keeps state in all the places where modules keep it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.metrics = MetricCollection([BinaryAUROC(), BinaryStatScores()])
        self.outputs: list[torch.Tensor] = []
        self.by_name: dict[str, list[float]] = defaultdict(list)
        self.counts = Counter()
        self.recent = deque(maxlen=2)
        self.seen: set[int] = set()
        self.pair = ([], 0)
        self.average = torch.zeros(4)
        self.replaced = torch.zeros(4)
        self.best = None

    def step(self, x: torch.Tensor) -> None:
        self.norm(x + torch.rand_like(x) + np.random.rand() + random.random())
        self.metrics.update(x[:, 0].sigmoid(), (x[:, 1] > 0).long())
        self.outputs.append(x)
        self.by_name["x"].append(x.sum().item())
        self.by_name[f"y{len(self.by_name)}"] = []
        self.counts["steps"] += 1
        self.recent.append(x.mean().item())
        self.seen.add(int(x.sum() * 1000))
        self.pair[0].append(1)
        self.average += x.mean(dim=0)
        self.replaced.data = 0.9 * self.replaced.data + x.mean(dim=0)
        self.best = x.max()
        self.new = len(self.outputs)


def picture(module: Stateful) -> object:
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    metrics = {name: copy.deepcopy(metric.metric_state) for name, metric in module.metrics.items(copy_state=False)}
    counts = {name: metric._update_count for name, metric in module.metrics.items(copy_state=False)}
    random_states = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    return copy.deepcopy(
        (attributes, {n: b.tolist() for n, b in module.named_buffers()}, counts, random_states)
    ), metrics


def same(one: object, other: object) -> bool:
    return repr(one) == repr(other)


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_restored(fails: bool) -> None:
    torch.manual_seed(0)
    module = Stateful()
    for _ in range(2):
        module.step(torch.randn(6, 4))
    before, objects = picture(module), {name: id(value) for name, value in vars(module).items()}

    with contextlib.suppress(KeyError), rollback_side_effects(module):
        module.step(torch.randn(3, 4))
        module.step(torch.randn(3, 4))
        assert not same(picture(module), before)
        if fails:
            raise KeyError

    assert same(picture(module), before)
    assert {name: id(value) for name, value in vars(module).items()} == objects
    assert not hasattr(module, "new") or module.new == 2


def test_parameters_are_not_restored() -> None:
    module = nn.Linear(2, 2)
    module.kept = {"weight": module.weight}

    with rollback_side_effects(module):
        module.weight.data = torch.ones(3, 3)

    assert torch.equal(module.weight, torch.ones(3, 3))
