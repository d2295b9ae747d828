"""What a pipeline cannot train as one process does is an error before the first step."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

from lightning_paral import ConfigurationError, ParalPipelineStrategy, RankFailedError
from lightning_paral.model.user_hooks import trainer_of
from tests.models.chain import Chain, fit_chain


class EndsAtOnce(Chain):
    """Leaves out the units of later stages, which wait for the output of the first."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.blocks[0](torch.tanh(self.first(x))))


class Averages(Chain):
    """Moves an average towards the weights, which at first are equal to it."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.first).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for average, weight in zip(self.target.parameters(), self.first.parameters(), strict=True):
                average.lerp_(weight, 0.1)
        return super().training_step(batch, batch_idx)


class HasDTensor(Chain):
    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2,))
        self.scale = nn.Parameter(distribute_tensor(self.scale.detach(), mesh, [Replicate()]))


class KeepsNumber(Chain):
    """A block keeps a number, which weighs the loss."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.blocks[number].size = 1.0
        self.blocks[number].register_forward_hook(self._keep)

    def _keep(self, block: Any, inputs: Any, output: Tensor) -> None:
        block.size = float(output.detach().abs().mean())

    def _loss(self, batch: Any) -> Tensor:
        return super()._loss(batch) * self.blocks[self.number].size


class Collects(Chain):
    """Hooks on blocks collect tensors in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda block, inputs, output: self.outputs.append(output))

    def _loss(self, batch: Any) -> Tensor:
        loss = super()._loss(batch) + 0.1 * sum(output.square().mean() for output in self.outputs)
        self.outputs.clear()
        return loss


class CollectsInput(Collects):
    """A hook collects what the first block is called with, which is there on all stages."""

    def __init__(self) -> None:
        Chain.__init__(self)
        self.outputs: list[Tensor] = []
        self.blocks[0].register_forward_hook(lambda block, inputs, output: self.outputs.append(inputs[0]))


class Gathers(Chain):
    """Blocks get a list or a dict, to which each adds a part of the loss."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind
        for block in self.blocks:
            block.register_forward_hook(self._keep, with_kwargs=True)
            block.forward = partial(_ignoring_parts, block.forward)  # type: ignore[method-assign]

    def _keep(self, block: Any, args: Any, kwargs: Any, output: Tensor) -> None:
        parts = kwargs["parts"]
        if isinstance(parts, list):
            parts.append(output.square().mean())
        else:
            parts["loss"] = parts.get("loss", 0) + output.square().mean()

    def _loss(self, batch: Any) -> Tensor:
        parts: Any = self.kind()
        hidden = torch.tanh(self.first(batch[0]))
        for block in self.blocks:
            hidden = block(hidden, parts=parts)
        added = sum(parts) if isinstance(parts, list) else parts["loss"]
        return torch.nn.functional.mse_loss(self.out(hidden), batch[1]) + 0.1 * added


def _ignoring_parts(forward: Callable[..., Tensor], *args: Any, parts: Any) -> Tensor:
    return forward(*args)


class SumsSmall(Chain):
    """Has a small loss, which is a sum."""

    def _loss(self, batch: Any) -> Tensor:
        return 1e-6 * (self(batch[0]) - batch[1]).square().sum()


class ChangesGradients(Chain):
    """Changes gradients in place, before or after the blocks."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        if self.change == "add":
            self.scale.square().backward()
        if self.change == "multiply" and self.scale.grad is not None:
            self.scale.grad.mul_(2.0)
        return loss


INSIDE = "uses a value from inside of a unit"


def refusal(make: Callable[[], Any], options: dict[str, Any], world_size: int, trainer_options: dict[str, Any]) -> str:
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises((ConfigurationError, RankFailedError)) as error:
        fit_chain(
            ParalPipelineStrategy(**options),
            world_size,
            module=module,
            num_sanity_val_steps=0,
            gradient_clip_val=None,
            accumulate_grad_batches=1,
            **trainer_options,
        )
    if trainer_of(module) is not None:
        for name, value in module.state_dict().items():
            assert (
                type(value).__name__ == "FlatShard" or name.endswith("calls") or torch.equal(value.cpu(), before[name])
            )
    return str(error.value)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (KeepsNumber, {}, INSIDE),
        (
            partial(KeepsNumber, 1),  # of the last stage, but of another part than the end of the step
            {"schedule": "interleaved"},
            INSIDE,
        ),
        (Collects, {"micro_batches": 1}, INSIDE),
        (Collects, {"schedule": "interleaved"}, INSIDE),
        (CollectsInput, {}, INSIDE),
        (partial(Gathers, list), {}, INSIDE),
        (partial(Gathers, dict), {"micro_batches": 1}, INSIDE),
        (SumsSmall, {}, "is not a mean over samples"),
        (partial(ChangesGradients, "add"), {}, "changes the gradient of"),
        (partial(ChangesGradients, "multiply"), {}, "changes the gradient of"),
        (EndsAtOnce, {}, "training_step ended without calling blocks.1"),
        (HasDTensor, {}, "scale is a DTensor already"),
        (Chain, {"balance": [2, 3]}, "Its numbers must add up to 4"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_module_is_refused(in_own_world, make: Callable[[], Any], options: dict[str, Any], message: str) -> None:
    messages = in_own_world(2, refusal, make, options, 2, {})

    assert any(message in each for each in messages), messages


def are_first_two_blocks(name: str, _: nn.Module) -> bool:
    return name in ("blocks.0", "blocks.1")


@pytest.mark.parametrize("options", [{}, {"balance": [1, 1, 1, 1]}], ids=str)
def test_more_stages_than_units_are_refused(on_ranks, options: dict[str, Any]) -> None:
    messages = on_ranks(4, refusal, Chain, {"units": are_first_two_blocks, **options}, 4, {})

    named = "4 stages need at least 4 units, but Chain has 2: blocks.0, blocks.1. Choose fewer stages"
    assert all(named in each for each in messages)


def refusal_later() -> str:
    options = {"num_sanity_val_steps": 0, "max_epochs": 2, "check_val_every_n_epoch": 2}
    with pytest.raises(ConfigurationError) as error:
        fit_chain(ParalPipelineStrategy(), 2, module=Averages, num_batches=6, **options)
    return str(error.value)


def test_what_shows_later_is_refused_then(on_ranks) -> None:
    message = "Averages.training_step changes the parameter target."
    assert all(message in each for each in on_ranks(2, refusal_later))


class HalvesGradients(Precision):
    """Clips in its own way."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        for parameter in self.main_params(optimizer):
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def refusal_of_plugin(make: Callable[[], Precision]) -> str:
    return refusal(Chain, {}, 2, {"plugins": [make()]})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(MixedPrecision, "16-mixed", "cpu"), "MixedPrecision (precision='16-mixed') cannot be used"),
        (HalvesGradients, "HalvesGradients (precision='32-true') cannot be used in a pipeline"),
    ],
    ids=["16-mixed", "own"],
)
def test_other_precisions_are_refused(on_ranks, make: Callable[[], Precision], message: str) -> None:
    assert all(message in each for each in on_ranks(2, refusal_of_plugin, make))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": [0, 4]}, "each an integer of at least 1"),
        ({"balance": []}, "balance="),
        ({"stages": 2, "balance": [1, 2, 1]}, "3 parts, but stages=2"),
        ({"schedule": "interleaved", "stages": 2, "balance": [1, 2, 1]}, "Give one number for each part"),
        ({"units": []}, "units is empty"),
    ],
    ids=str,
)
def test_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ParalPipelineStrategy(**options)


def test_stages_that_do_not_divide_the_world_are_refused(on_ranks) -> None:
    messages = on_ranks(2, refusal, Chain, {"stages": 3}, 2, {})

    assert all("stages=3 does not divide the 2 ranks" in each for each in messages)
