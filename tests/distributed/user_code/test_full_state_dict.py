"""`full_state_dict` returns what `state_dict` does in one process. What has shards is not written to a file."""

import io
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_paral import ParalDDPStrategy, ParalFSDPStrategy, ParalPipelineStrategy, ParalZeROStrategy
from lightning_paral.errors import CheckpointError, ConfigurationError
from tests.models.chain import Chain, fit_chain

SHARDED: dict[str, Any] = {
    "fsdp": partial(ParalFSDPStrategy, units=["Block"]),
    "tp": partial(ParalFSDPStrategy, tensor_parallel=2),
    "pp": ParalPipelineStrategy,
    "zero3": partial(
        ParalZeROStrategy,
        stage=3,
        deepspeed_config={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
    ),
}
STRATEGIES: dict[str, Any] = SHARDED | {
    "ddp": partial(ParalDDPStrategy, find_unused_parameters=True),
    "zero2": partial(ParalZeROStrategy, stage=2),
}


def torch_save(state: dict[str, Tensor]) -> None:
    torch.save(state, io.BytesIO())


def as_safetensors_does(state: dict[str, Tensor]) -> None:
    for value in state.values():
        value.untyped_storage()


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.never.requires_grad_(False)  # ZeRO trains no parameters without gradients
        self.again = self.out
        self.said: list[str] = []
        self.read: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        for part, write in product((self, self.blocks), (torch_save, as_safetensors_does)):
            try:
                write({name: value.cpu() for name, value in part.state_dict().items()})
            except (CheckpointError, ConfigurationError) as error:
                self.said.append(str(error))

    def on_train_end(self) -> None:
        self.read = [self.trainer.strategy.full_state_dict(part) for part in (None, self.blocks[1])]  # type: ignore[attr-defined]


def read(label: str) -> tuple[list[str], list[dict[str, Tensor]], dict[str, Tensor]]:
    module = Tied()
    fit_chain(STRATEGIES[label](split="global"), 2, module=module, num_batches=2)
    return module.said, module.read, dict(module.state_dict())


@pytest.mark.parametrize("label", STRATEGIES)
def test_state_dicts_are_full_or_not_written(on_ranks, label: str) -> None:
    for said, (full, of_part), after in on_ranks(2, read, label):
        assert {type(value) for value in full.values()} == {Tensor}
        torch.testing.assert_close(full, after, rtol=0, atol=0)
        assert full["again.weight"].data_ptr() == full["out.weight"].data_ptr()
        inner = {name.removeprefix("blocks.1."): v for name, v in after.items() if name.startswith("blocks.1.")}
        torch.testing.assert_close(of_part, inner, rtol=0, atol=0)
        assert len(said) == (2 * 2 * 2 if label in SHARDED else 0)
        assert all("full_state_dict(part)" in each for each in said)
