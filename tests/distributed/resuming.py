"""Save in layouts of ranks, resume in others, and compare with a run in one process that was not interrupted."""

import subprocess
from collections.abc import Callable, Container, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_paral.diagnostics.check_compare import CheckRow, Checks
from lightning_paral.diagnostics.check_run import Fit, Task
from lightning_paral.diagnostics.rank_pool import RankPool
from tests.models.chain import NUM_BATCHES, loader

Layout = tuple[int, Callable[..., Any]]
"""A number of ranks, and what creates their strategy."""


def project(make: Callable[[], Any], all_trained: bool) -> Fit:
    module = make()
    module.logs_calls = False
    module.never.requires_grad_(not all_trained)
    return Fit(
        module=module, data=loader(NUM_BATCHES), trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    )


def parameters(resumptions: Iterable[tuple[str, list[str]]], full: Container[str]) -> list[Any]:
    """Return targets and their sources as parameters, of which those with a target in `full` are in the full lane."""
    lanes = {True: pytest.mark.lane("full"), False: pytest.mark.lane("all")}
    return [pytest.param(*each, marks=lanes[each[0] in full], id=f"{each[0]}-{each[1]}") for each in resumptions]


class Resuming:
    """Checkpoints of a module in named layouts, each saved when it is first needed, inside an epoch.

    ZeRO refuses parameters that a backward pass gives no gradient: with `all_trained`, the module has none.
    """

    def __init__(
        self,
        make: Callable[[], LightningModule],
        layouts: dict[str, Layout],
        pool: RankPool,
        folder: Path,
        all_trained: bool,
    ) -> None:
        task = Task(steps=NUM_BATCHES // 2, folder=folder, seed=3)
        # ZeRO cannot train in fp64, so nothing does that has to resume from its checkpoints.
        self.checks = Checks(partial(project, make, all_trained), task, pool, precisions=(False,))
        self.layouts, self.folder = layouts, folder
        self._rows: dict[str, CheckRow] = {}

    def row(self, label: str) -> CheckRow:
        if label not in self._rows:
            num_ranks, make = self.layouts[label]
            self._rows[label] = self.checks.row(label, make, num_ranks)
        return self._rows[label]

    def path(self, label: str) -> str:
        assert self.row(label).outcome == "equal", self.row(label)
        return str(self.folder / f"{label}.ckpt")

    def assert_resumed_equals_uninterrupted(self, target: str, sources: list[str]) -> None:
        num_ranks, make = self.layouts[target]
        for source in sources:
            assert self.row(source).outcome == "equal", self.row(source)
            found = self.checks.resumed(self.row(source), target, make, num_ranks)
            assert found.outcome == "equal", found

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
