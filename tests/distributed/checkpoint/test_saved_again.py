"""A resumed run that saves before its first optimizer step saves the states that it loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_paral.checkpoint.lazy_tensor import materialize
from lightning_paral.checkpoint.load import load
from lightning_paral.compat.torch.tensors import tree_map_only
from lightning_paral.distributed.exchange import RankGroup
from tests.contract.cases import MAIN, labels, with_ranks
from tests.models.resumable import SaveOnce, losses


class SaveFirst(SaveOnce):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not Path(self.path).exists():
            trainer.save_checkpoint(self.path)


def save_and_save_again(label: str, first: Path, second: Path) -> None:
    losses(label, save_to=first)
    # With two batches per optimizer step, the first batch ends without a step.
    losses(label, resume_from=first, callbacks=[SaveFirst(str(second))])


def optimizer_state(path: Path) -> Any:
    state = load(path, RankGroup())["optimizer_states"][0]["state"]
    return tree_map_only(torch.Tensor, materialize, state)


@pytest.mark.parametrize("strategy", labels(with_ranks(MAIN, 2)))
def test_optimizer_states_are_saved_again_before_the_first_step(on_ranks, tmp_path: Path, strategy: str) -> None:
    paths = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    on_ranks(2, save_and_save_again, strategy, *paths)

    first, second = map(optimizer_state, paths)
    assert first
    torch.testing.assert_close(second, first, rtol=0.0, atol=0.0)
