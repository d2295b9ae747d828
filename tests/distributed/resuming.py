"""Save in layouts of ranks, resume in others, and compare with a run in one process that was not interrupted."""

import subprocess
from collections.abc import Callable, Container, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_paral.diagnostics.rank_pool import RankPool
from tests.models.chain import NUM_BATCHES, SAVED_AFTER, fit_chain

Layout = tuple[int, Callable[..., Any]]
"""A number of ranks, and what creates their strategy."""
Fitted = tuple[dict[int, float], dict[str, Tensor]]


def fit(layout: Layout | None, make: Callable[[], LightningModule], **options: Any) -> Fitted:
    world_size, strategy = (1, "auto") if layout is None else (layout[0], layout[1](split="global"))
    losses, module, _ = fit_chain(strategy, world_size, module=make, **options)
    return losses, {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def save(layout: Layout, make: Callable[[], LightningModule], path: str) -> None:
    fit(layout, make, save_to=path)


def resume(layout: Layout, make: Callable[[], LightningModule], paths: list[str]) -> list[Fitted]:
    return [fit(layout, make, resume_from=path) for path in paths]


def parameters(resumptions: Iterable[tuple[str, list[str]]], full: Container[str]) -> list[Any]:
    """Return targets and their sources as parameters, of which those with a target in `full` are in the full lane."""
    lanes = {True: pytest.mark.lane("full"), False: pytest.mark.lane("all")}
    return [pytest.param(*each, marks=lanes[each[0] in full], id=f"{each[0]}-{each[1]}") for each in resumptions]


class Resuming:
    """Checkpoints of a module in named layouts, each saved when it is first needed."""

    def __init__(self, make: Callable[[], LightningModule], layouts: dict[str, Layout], pool: RankPool, folder: Path):
        self.make, self.layouts, self.pool, self.folder = make, layouts, pool, folder

    @cached_property
    def expected(self) -> Fitted:
        return fit(None, self.make)

    def path(self, label: str) -> str:
        path = self.folder / f"{label}.ckpt"
        if not path.exists():
            layout = self.layouts[label]
            self.pool.run(layout[0], save, layout, self.make, str(path))
        return str(path)

    def assert_resumed_equals_uninterrupted(self, target: str, sources: list[str]) -> None:
        layout, (expected_losses, expected_weights) = self.layouts[target], self.expected

        ranks = self.pool.run(layout[0], resume, layout, self.make, [self.path(source) for source in sources])

        for number, source in enumerate(sources):
            of_ranks = [results[number][0] for results in ranks]
            assert list(of_ranks[0]) == list(range(SAVED_AFTER, NUM_BATCHES)), source
            for batch in of_ranks[0]:
                mean = sum(losses[batch] for losses in of_ranks) / len(of_ranks)
                assert mean == pytest.approx(expected_losses[batch], rel=1e-5), f"{source}, batch {batch}"
            for results in ranks:
                for name, weight in results[number][1].items():
                    assert (weight - expected_weights[name]).abs().max() <= 1e-5, f"{source}, {name}"

    def content(self, label: str) -> dict[str, Any]:
        """Return the checkpoint as one file, which `paral consolidate` makes of a folder."""
        path = self.path(label)
        if Path(path).is_dir():
            target = str(Path(path).with_suffix(".consolidated.ckpt"))
            subprocess.run(["paral", "consolidate", path, target], check=True)
            path = target
        return torch.load(path, weights_only=False)

    def assert_contents_equal(self, label: str, others: Iterable[str]) -> None:
        expected = self.content(label)
        (of_one,) = expected["optimizer_states"]
        for content in map(self.content, others):
            assert content["state_dict"].keys() == expected["state_dict"].keys()
            for name, value in content["state_dict"].items():
                torch.testing.assert_close(value, expected["state_dict"][name], rtol=1e-5, atol=1e-6)
            (state,) = content["optimizer_states"]
            assert state["state"].keys() == of_one["state"].keys()
            for key, values in state["state"].items():
                for name, value in values.items():
                    torch.testing.assert_close(value, of_one["state"][key][name], rtol=1e-4, atol=1e-6)
            assert [group["params"] for group in state["param_groups"]] == [g["params"] for g in of_one["param_groups"]]
