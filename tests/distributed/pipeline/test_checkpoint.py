"""Checkpoints of a pipeline are those of every other strategy, at any number of stages."""

import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy, ParalPipelineStrategy, ParalZeROStrategy
from tests.models.chain import NUM_BATCHES, SAVED_AFTER, Chain, fit_chain

SHARDED, HYBRID = "2 stages x 2 shards", "2 replicas x 2 shards"
LAYOUTS: dict[str, tuple[int, Any]] = {
    "one process": (1, partial(ParalDDPStrategy, find_unused_parameters=True)),
    "paral_ddp": (2, partial(ParalDDPStrategy, find_unused_parameters=True)),
    "paral_fsdp": (2, partial(ParalFSDPStrategy, units=["Block"])),
    "paral_zero3": (2, partial(ParalZeROStrategy, stage=3)),
    "2 stages": (2, ParalPipelineStrategy),
    "4 stages": (4, ParalPipelineStrategy),
    "2 stages, full": (2, partial(ParalPipelineStrategy, checkpoint="full")),
    "2 stages x 2 replicas": (4, partial(ParalPipelineStrategy, stages=2)),
    SHARDED: (4, partial(ParalPipelineStrategy, stages=2, shard=True)),
    HYBRID: (4, partial(ParalPipelineStrategy, stages=1, shard=2)),
}
PIPELINES = [layout for layout in LAYOUTS if "stages" in layout]
OTHERS = [layout for layout in LAYOUTS if layout not in PIPELINES]
ZERO = "paral_zero3"
SEEN = [layout for layout in LAYOUTS if layout not in (ZERO, HYBRID)]


def strategy_of(label: str) -> Any:
    return LAYOUTS[label][1](split="global")


def save(label: str, path: str) -> dict[int, float]:
    return fit_chain(strategy_of(label), LAYOUTS[label][0], save_to=path)[0]


def resume(label: str, paths: list[str]) -> list[tuple[dict[int, float], dict[str, Tensor]]]:
    results = []
    for path in paths:
        losses, module, _ = fit_chain(strategy_of(label), LAYOUTS[label][0], resume_from=path)
        results.append((losses, {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}))
    return results


def mean_of(ranks: list[dict[int, float]]) -> dict[int, float]:
    return {batch: sum(losses[batch] for losses in ranks) / len(ranks) for batch in ranks[0]}


@pytest.fixture(scope="module")
def expected() -> tuple[dict[int, float], dict[str, Tensor]]:
    losses, module, _ = fit_chain("auto", 1)
    return losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("pipelines")
    done: dict[str, str] = {}

    def path_of(label: str) -> str:
        if label not in done:
            done[label] = f"{folder}/{label}.ckpt"
            rank_pool.run(LAYOUTS[label][0], save, label, done[label])
        return done[label]

    return path_of


@pytest.mark.parametrize(
    ("target", "sources"),
    [
        *((layout, SEEN) for layout in PIPELINES if layout != SHARDED),
        *((layout, PIPELINES) for layout in OTHERS if layout in SEEN),
        (SHARDED, ["one process", "paral_fsdp", "4 stages", "2 stages x 2 replicas", SHARDED, HYBRID]),
        (HYBRID, [SHARDED]),
        (ZERO, PIPELINES),
        ("2 stages", [ZERO]),
        (SHARDED, [ZERO]),
    ],
    ids=str,
)
def test_resumed_run_equals_the_uninterrupted_one(on_ranks, saved, expected, target: str, sources: list[str]) -> None:
    expected_losses, expected_weights = expected

    ranks = on_ranks(LAYOUTS[target][0], resume, target, [saved(source) for source in sources])

    for number, source in enumerate(sources):
        losses = mean_of([results[number][0] for results in ranks])
        assert list(losses) == list(range(SAVED_AFTER, NUM_BATCHES)), source
        for batch, loss in losses.items():
            assert loss == pytest.approx(expected_losses[batch], rel=1e-5), f"{source}, batch {batch}"
        for results in ranks:
            for name, weight in results[number][1].items():
                assert (weight - expected_weights[name]).abs().max() <= 1e-5, f"{source}, {name}"


def test_checkpoint_is_the_one_of_one_process(saved, tmp_path: Path) -> None:
    contents = []
    for number, label in enumerate(("one process", *PIPELINES)):
        target = tmp_path / f"{number}.ckpt"
        if Path(saved(label)).is_dir():
            subprocess.run(["paral", "consolidate", saved(label), target], check=True)
        else:
            target = Path(saved(label))
        contents.append(torch.load(target, weights_only=False))

    for content in contents[1:]:
        assert content["state_dict"].keys() == contents[0]["state_dict"].keys()
        for name, value in content["state_dict"].items():
            torch.testing.assert_close(value, contents[0]["state_dict"][name], rtol=1e-5, atol=1e-6)
        (state,), (of_one,) = content["optimizer_states"], contents[0]["optimizer_states"]
        assert state["state"].keys() == of_one["state"].keys()
        for key, values in state["state"].items():
            for name, value in values.items():
                torch.testing.assert_close(value, of_one["state"][key][name], rtol=1e-4, atol=1e-6)
        assert [group["params"] for group in state["param_groups"]] == [g["params"] for g in of_one["param_groups"]]


def test_module_loads_from_checkpoint(saved) -> None:
    module = Chain.load_from_checkpoint(saved("2 stages"))

    assert sum(parameter.numel() for parameter in module.parameters()) > 0
