"""Hooks, pruning and parametrizations act as in one process, or are refused by name."""

from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.data import DataLoader

from lightning_paral import ConfigurationError, ParalFSDPStrategy
from tests.running import quiet_trainer


class Changed(LightningModule):
    """Two layers, which the functions below change before or during training."""

    def __init__(self, change: str, when: str) -> None:
        super().__init__()
        self.change, self.when = CHANGES[change], when
        self.calls = 0
        self.hidden = nn.Linear(4, 6)
        self.out = nn.Linear(6, 3)
        self.at("__init__")

    def at(self, when: str) -> None:
        if when == self.when:
            self.change(self)

    def forward(self, batch: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(batch)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.at("training_step")
        return nn.functional.mse_loss(self(batch), batch[:, :3].sin())

    def on_train_start(self) -> None:
        self.at("on_train_start")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def on_parameter(module: Any) -> None:
    module.hidden.weight.register_hook(lambda gradient: gradient * 2)


def after_accumulation(module: Any) -> None:
    module.hidden.weight.register_post_accumulate_grad_hook(lambda parameter: None)


def on_module(module: Any) -> None:
    def count(part: nn.Module, inner: Any, outer: Any) -> None:
        module.calls += 1

    module.hidden.register_full_backward_hook(count)
    module.out.register_full_backward_hook(count)


def weight_norm(module: Any) -> None:
    parametrizations.weight_norm(module.hidden)


def spectral_norm(module: Any) -> None:
    parametrizations.spectral_norm(module.hidden)


def orthogonal(module: Any) -> None:
    parametrizations.orthogonal(module.hidden)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def parametrized(module: Any) -> None:
    parametrize.register_parametrization(module.hidden, "weight", Doubled())


def hooked_weight_norm(module: Any) -> None:
    torch.nn.utils.weight_norm(module.hidden)


def hooked_spectral_norm(module: Any) -> None:
    torch.nn.utils.spectral_norm(module.hidden)


def pruned(module: Any) -> None:
    prune.l1_unstructured(module.hidden, "weight", amount=0.5)


def tied(module: Any) -> None:
    module.again = module.hidden


def replaced(module: Any) -> None:
    module.out.bias = nn.Parameter(torch.zeros(3))


def sparse(module: Any) -> None:
    module.embedding = nn.Embedding(5, 2, sparse=True)


CHANGES = {
    function.__name__: function
    for function in (
        on_parameter, after_accumulation, on_module, weight_norm, spectral_norm, orthogonal, parametrized,
        hooked_weight_norm, hooked_spectral_norm, pruned, tied, replaced, sparse,
    )
}  # fmt: skip
EQUAL = ("on_parameter", "on_module", "weight_norm", "spectral_norm", "orthogonal", "parametrized",
         "hooked_weight_norm", "hooked_spectral_norm", "pruned", "tied")  # fmt: skip
REFUSED: dict[tuple[str, str], list[str]] = {
    ("after_accumulation", "__init__"): ["hidden.weight", "register_post_accumulate_grad_hook", "<lambda>"],
    ("after_accumulation", "on_train_start"): ["hidden.weight", "register_post_accumulate_grad_hook"],
    ("pruned", "on_train_start"): ["'weight_orig'", "hidden (Linear)", "__init__"],
    ("parametrized", "on_train_start"): ["'weight'", "hidden (Linear)", "__init__"],
    ("replaced", "on_train_start"): ["'bias'", "out (Linear)", "copy_"],
    ("sparse", "__init__"): ["embedding", "sparse=False"],
}


def fit(change: str, when: str, **options: Any) -> Any:
    torch.manual_seed(0)
    module = Changed(change, when)
    data = DataLoader(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), 8)  # type: ignore[arg-type]
    quiet_trainer(max_epochs=1, **options).fit(module, data)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}, module.calls


@cache
def in_one_process(change: str) -> Any:
    return fit(change, "__init__", devices=1)


def fit_changed() -> dict[str, Any]:
    return {name: fit(name, "__init__", strategy=ParalFSDPStrategy(split="global"), devices=2) for name in EQUAL}


def test_changes_before_training_equal_one_process(on_ranks) -> None:
    for results in on_ranks(2, fit_changed):
        for name, found in results.items():
            torch.testing.assert_close(found, in_one_process(name), msg=lambda said, name=name: f"{name}: {said}")


def refusal(change: str, when: str) -> str:
    try:
        fit(change, when, strategy=ParalFSDPStrategy(), devices=2)
    except ConfigurationError as error:
        return str(error)
    return "trained"


def refusals() -> dict[tuple[str, str], str]:
    return {case: refusal(*case) for case in REFUSED}


def test_hooks_that_fsdp_would_drop_are_refused_by_name(on_ranks) -> None:
    for said in on_ranks(2, refusals):
        for case, message in said.items():
            for part in REFUSED[case]:
                assert part in message, (case, message)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, z: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.tanh(self.layer(z))
        sums += scale.sum(1)
        return z * scale.exp(), sums


class Flows(Changed):
    def __init__(self) -> None:
        super().__init__("tied", "never")
        self.flows = nn.ModuleList(Flow() for _ in range(2))

    def training_step(self, z: Tensor, batch_idx: int) -> Tensor:
        sums = torch.zeros(len(z))
        for flow in self.flows:
            z, sums = flow(z, sums)
        return (z.square().sum(1) - sums).mean()


def refuse(module: LightningModule, **options: Any) -> str:
    data = DataLoader(torch.randn(24, 4), 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        quiet_trainer(max_epochs=1, strategy=ParalFSDPStrategy(), devices=2, **options).fit(module, data)
    return str(caught.value)


def flows_and_pruning() -> tuple[str, str]:
    pruning = ModelPruning("l1_unstructured", amount=0.5)
    return refuse(Flows()), refuse(Changed("tied", "never"), callbacks=[pruning])


def test_inputs_changed_in_place_and_pruning_are_named(on_ranks) -> None:
    for in_place, pruning in on_ranks(2, flows_and_pruning):
        assert "in place" in in_place
        assert "flows.0" in in_place
        assert "ModelPruning" in pruning
        assert "paral_ddp" in pruning
