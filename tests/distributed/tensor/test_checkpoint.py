"""Checkpoints of split layers are those of every other strategy, with any number of tensor ranks."""

import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy, ParalPipelineStrategy, ParalZeROStrategy
from tests.models.chain import NUM_BATCHES, SAVED_AFTER, fit_chain
from tests.models.split_layers import PLAN, SplitLayers

FOUR_WAYS = {name: style for name, style in PLAN.items() if name != "out"}
LAYOUTS: dict[str, tuple[int, Any]] = {
    "one process": (1, partial(ParalDDPStrategy, find_unused_parameters=True)),
    "paral_ddp": (2, partial(ParalDDPStrategy, find_unused_parameters=True)),
    "paral_fsdp": (4, partial(ParalFSDPStrategy, units=["Block"])),
    "paral_zero3": (2, partial(ParalZeROStrategy, stage=3)),
    "2 stages": (2, ParalPipelineStrategy),
    "2 tensor ranks": (2, partial(ParalFSDPStrategy, tensor_parallel="node", plan=PLAN)),
    "2 tensor ranks, full": (2, partial(ParalFSDPStrategy, tensor_parallel=2, plan=PLAN, checkpoint="full")),
    "4 tensor ranks": (4, partial(ParalFSDPStrategy, tensor_parallel=4, plan=FOUR_WAYS)),
    "2 shards x 2 tensor ranks": (4, partial(ParalFSDPStrategy, tensor_parallel=2, plan=PLAN)),
    "2 replicas x 2 tensor ranks": (4, partial(ParalFSDPStrategy, tensor_parallel=2, replicate=2, plan=PLAN)),
}
SPLIT = [layout for layout in LAYOUTS if "tensor" in layout]
OTHERS = [layout for layout in LAYOUTS if layout not in SPLIT]
MIXED = ["2 tensor ranks", "2 shards x 2 tensor ranks"]
ZERO = "paral_zero3"


def strategy_of(label: str) -> Any:
    return LAYOUTS[label][1](split="global")


def fit(strategy: Any, world_size: int, **options: Any) -> Any:
    torch.manual_seed(3)
    return fit_chain(strategy, world_size, module=SplitLayers(), **options)


def save(label: str, path: str) -> dict[int, float]:
    return fit(strategy_of(label), LAYOUTS[label][0], save_to=path)[0]


def resume(label: str, paths: list[str]) -> list[tuple[dict[int, float], dict[str, Tensor]]]:
    results = []
    for path in paths:
        losses, module, _ = fit(strategy_of(label), LAYOUTS[label][0], resume_from=path)
        results.append((losses, {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}))
    return results


@pytest.fixture(scope="module")
def expected() -> tuple[dict[int, float], dict[str, Tensor]]:
    losses, module, _ = fit("auto", 1)
    return losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.fixture(scope="module")
def saved(rank_pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("split")
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
        ("2 tensor ranks", [layout for layout in LAYOUTS if layout not in (ZERO, "paral_ddp")]),
        ("2 shards x 2 tensor ranks", ["one process", "paral_fsdp", "2 stages", *SPLIT]),
        *((layout, ["one process", *MIXED]) for layout in SPLIT if layout not in MIXED),
        *((layout, MIXED) for layout in OTHERS if layout != ZERO),
        (ZERO, MIXED),
        ("2 shards x 2 tensor ranks", [ZERO]),
    ],
    ids=str,
)
def test_resumed_run_equals_the_uninterrupted_one(on_ranks, saved, expected, target: str, sources: list[str]) -> None:
    expected_losses, expected_weights = expected

    ranks = on_ranks(LAYOUTS[target][0], resume, target, [saved(source) for source in sources])

    for number, source in enumerate(sources):
        of_ranks = [results[number][0] for results in ranks]
        assert list(of_ranks[0]) == list(range(SAVED_AFTER, NUM_BATCHES)), source
        for batch in of_ranks[0]:
            mean = sum(losses[batch] for losses in of_ranks) / len(of_ranks)
            assert mean == pytest.approx(expected_losses[batch], rel=1e-5), f"{source}, batch {batch}"
        for results in ranks:
            for name, weight in results[number][1].items():
                assert (weight - expected_weights[name]).abs().max() <= 1e-5, f"{source}, {name}"


def test_checkpoint_is_the_one_of_one_process(saved, tmp_path: Path) -> None:
    contents = []
    for number, label in enumerate(("one process", *SPLIT)):
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
    module = SplitLayers.load_from_checkpoint(saved("2 shards x 2 tensor ranks"))

    assert module.blocks[0].up.weight.shape == (16, 8)
