"""Several optimizers: values of one optimizer, and what is read too early."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_paral import ParalZeROStrategy
from lightning_paral.engines.zero.training.gradients import GradientsNotReadyError
from lightning_paral.errors import ConfigurationError
from lightning_paral.options import Offload
from tests.compile_operators import skip_unless_compilable
from tests.models.reading import read_values
from tests.models.several_optimizers import Plain, fit

NOTHING_KEPT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def strategy_of(name: str) -> Any:
    return ParalZeROStrategy(stage=3, deepspeed_config=NOTHING_KEPT) if name == "zero3, nothing kept" else name


# Values that hooks and steps read


class Reading(Plain):
    """Records gradients and states of one optimizer's parameters, also while another optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        of_generator = optimizer is self.trainer.optimizers[0]
        network = self.generator if of_generator else self.discriminator
        parameters = {f"{of_generator} {name}": parameter for name, parameter in network.named_parameters()}
        with_state = self.trainer.global_step > 1
        self.seen |= read_values(self.trainer.strategy, parameters, optimizer, with_state=with_state)


def read(strategy: str | None, num_ranks: int) -> dict[str, Tensor]:
    model = Reading()
    fit(model, num_ranks, 2, **({} if strategy is None else {"strategy": strategy_of(strategy)}))
    return model.seen


@pytest.mark.parametrize("strategy", ["paral_zero1", "zero3, nothing kept"])
def test_gradients_and_states_are_read_by_optimizer(on_ranks, strategy: str) -> None:
    expected = read(None, 1)
    assert any("exp_avg" in name for name in expected)
    for seen in on_ranks(2, read, strategy, 2):
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-6)


# Refusals


class ReadTooEarly(Plain):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.descend(self.generator_loss(batch[0]))
        strategy: Any = self.trainer.strategy
        strategy.gradient_norm()
        self.descend(self.generator_loss(batch[0]))


class NoGradients(Plain):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        strategy.gradient_norm()


REFUSED: dict[Any, tuple[type[Exception], str]] = {
    ReadTooEarly: (ConfigurationError, "read and clip them after the last backward pass"),
    NoGradients: (GradientsNotReadyError, "No optimizer has gradients now"),
}


def refusals(stage: Any) -> None:
    for kind, (error, message) in REFUSED.items():
        with pytest.raises(error, match=message):
            fit(kind(), 2, strategy=ParalZeROStrategy(stage=stage))
        dist.barrier()


@pytest.mark.parametrize("stage", [2, 3])
def test_steps_that_would_differ_from_one_process_are_refused(on_ranks, stage: int) -> None:
    on_ranks(2, refusals, stage)


def on_nvme(folder: str) -> None:
    offload = Offload("nvme", path=folder)
    with pytest.raises(ConfigurationError, match="2 optimizers, but offload_optimizer to NVMe"):
        fit(Plain(), 2, strategy=ParalZeROStrategy(stage=3, offload_optimizer=offload))


def test_nvme_with_two_optimizers_is_refused(on_ranks, tmp_path: Path) -> None:
    skip_unless_compilable("async_io")
    on_ranks(2, on_nvme, str(tmp_path))
