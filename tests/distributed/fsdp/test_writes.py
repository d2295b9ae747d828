"""Writes to parameters in hooks, steps and methods take effect as in one process, or are refused."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paral import ConfigurationError, ParalFSDPStrategy
from tests.running import quiet_trainer

M = 0.5


def pairs(module: Any) -> list[tuple[nn.Parameter, nn.Parameter]]:
    return list(zip(module.target.parameters(), module.online.parameters(), strict=True))


def assign(module: Any) -> None:
    for q, p in pairs(module):
        q.data = M * q.data + (1 - M) * p.data


def chain_through_data(module: Any) -> None:
    for q, p in pairs(module):
        q.data.mul_(M).add_((1 - M) * p.detach().data)


@torch.no_grad()
def lerp(module: Any) -> None:
    for q, p in pairs(module):
        q.lerp_(p, 1 - M)


def lerp_detached(module: Any) -> None:
    for q, p in pairs(module):
        q.detach().lerp_(p.detach(), 1 - M)


@torch.no_grad()
def foreach(module: Any) -> None:
    torch._foreach_lerp_(list(module.target.parameters()), list(module.online.parameters()), 1 - M)


@torch.no_grad()
def over_state_dicts(module: Any) -> None:
    for q, p in zip(module.target.state_dict().values(), module.online.state_dict().values(), strict=True):
        q.copy_(M * q + (1 - M) * p)


def load_state_dict(module: Any) -> None:
    module.target.load_state_dict(module.online.state_dict())


def load_average(module: Any) -> None:
    theirs = module.online.state_dict()
    module.target.load_state_dict({k: M * v + (1 - M) * theirs[k] for k, v in module.target.state_dict().items()})


def clamp_trained(module: Any) -> None:
    for p in module.online.parameters():
        p.data.clamp_(-0.2, 0.2)


@torch.no_grad()
def normalise_trained(module: Any) -> None:
    for p in module.online.parameters():
        p.div_(p.norm(dim=0, keepdim=True) + p.norm())


def swap(module: Any) -> None:
    for q, p in pairs(module):
        kept = q.data
        q.data = (p * 1).data
        q.data = kept
        q.data.mul_(0.9)


@torch.no_grad()
def load_whole(module: Any) -> None:
    """Return tensors that are not sharded."""
    for q in module.target.parameters():
        q.copy_(torch.arange(float(q.numel())).view(q.shape))
    module.target.load_state_dict({k: torch.full(v.shape, 0.1) for k, v in module.target.state_dict().items()})
    module.target[0].bias.data = torch.arange(5.0)


def by_index(module: Any) -> None:
    for q in module.target.parameters():
        q.data[0] = 3.0
        q.data[[1, -1]] = 0.5
        q.data[q.data > 0.3] = 0.25
        q.data[-1].zero_()
        q.data[1:3].mul_(2)
    module.target[0].weight.data[1, 2] = 7.0


@torch.no_grad()
def initialise(module: Any) -> None:
    torch.manual_seed(5)
    for q in module.target.parameters():
        q.normal_().add_(torch.randn_like(q)).add_(torch.rand_like(q)).add_(torch.empty_like(q).exponential_())
    for q in (module.target[0].weight, module.target[2].weight):
        nn.init.kaiming_uniform_(q)
        nn.init.trunc_normal_(q.data)
        q.add_(nn.init.eye_(torch.empty_like(q)))

    nn.init.orthogonal_(module.target[0].weight)

    def reset(part: nn.Module) -> None:
        if isinstance(part, nn.Linear):
            nn.init.xavier_uniform_(part.weight)
            nn.init.zeros_(part.bias)

    module.target[2].apply(reset)


KINDS = {
    function.__name__: function
    for function in (
        assign, chain_through_data, lerp, lerp_detached, foreach, over_state_dicts, load_state_dict, load_average,
        clamp_trained, normalise_trained, swap, load_whole, by_index, initialise,
    )
}  # fmt: skip


class Momentum(LightningModule):
    """A trained online network and a target network that user code updates. No number of ranks divides their shapes."""

    def __init__(self, kind: str, place: str) -> None:
        super().__init__()
        self.update: Callable[[Any], None] = KINDS[kind]
        self.place = place
        # Between forward and backward, autograd refuses such a write or computes wrong gradients.
        self.changes_trained = kind in ("clamp_trained", "normalise_trained")
        self.online = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.scale = nn.Linear(3, 3)

    def at(self, place: str) -> None:
        if place == self.place:
            self.update(self)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.at("training_step")
        with torch.no_grad():
            target = self.target(batch)
        loss = ((self.online(batch) - self.scale(target) - 1) ** 2).mean()
        if not self.changes_trained:
            self.at("after_forward")
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.at("validation_step")
        self.online(batch)

    def on_validation_epoch_end(self) -> None:
        self.at("on_validation_epoch_end")

    def on_train_batch_end(self, *args: Any) -> None:
        self.at("on_train_batch_end")

    def on_before_zero_grad(self, *args: Any) -> None:
        if not self.changes_trained:
            self.at("on_before_zero_grad")

    def on_before_backward(self, *args: Any) -> None:
        if not self.changes_trained:
            self.at("on_before_backward")

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.at("on_before_optimizer_step")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.at("optimizer_step")

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([*self.online.parameters(), *self.scale.parameters()], 0.05)


def loader() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(24, 4, generator=torch.Generator().manual_seed(1)), 8)  # type: ignore[arg-type]


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def fit(module: LightningModule, **options: Any) -> dict[str, Tensor]:
    quiet_trainer(max_epochs=1, val_check_interval=2, num_sanity_val_steps=0, **options).fit(module, loader(), loader())
    return weights(module)


def is_scale(name: str, module: nn.Module) -> bool:
    return name == "scale"


UNITS: dict[str, Any] = {"each a unit": "auto", "in the root": is_scale, "networks": ["Sequential"]}


def fit_all(place: str, num_ranks: int, units: str = "") -> dict[str, dict[str, Tensor]]:
    options: dict[str, Any] = {"devices": num_ranks}
    results = {}
    for kind in KINDS:
        if num_ranks > 1:
            options["strategy"] = ParalFSDPStrategy(split="global", units=UNITS[units])
        torch.manual_seed(0)
        results[kind] = fit(Momentum(kind, place), **options)
    return results


@cache
def in_one_process(place: str) -> dict[str, dict[str, Tensor]]:
    return fit_all(place, 1)


CASES = (
    *(
        ("in the root", place)
        for place in ("on_train_batch_end", "training_step", "after_forward", "on_before_backward")
    ),
    ("in the root", "validation_step"),
    *(("each a unit", place) for place in ("training_step", "optimizer_step", "on_before_zero_grad")),
    *(("networks", place) for place in ("on_validation_epoch_end", "on_before_optimizer_step")),
)


@pytest.mark.parametrize(("units", "place"), CASES)
def test_writes_take_effect_as_in_one_process(on_ranks, units: str, place: str) -> None:
    for results in on_ranks(2, fit_all, place, 2, units):
        for kind, found in results.items():
            expected = in_one_process(place)[kind]
            torch.testing.assert_close(found, expected, msg=lambda said, kind=kind: f"{kind}: {said}")


class Saved(Momentum):
    def __init__(self, path: str) -> None:
        super().__init__("assign", "training_step")
        self.path = path

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(self.path)


def fit_and_save(num_ranks: int, folder: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Saved(f"{folder}/saved.ckpt")
    strategy = ParalFSDPStrategy(split="global", units=is_scale, checkpoint="full")
    options = {"strategy": strategy, "devices": num_ranks} if num_ranks > 1 else {"devices": 1}
    trainer = quiet_trainer(max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0, **options)
    trainer.fit(module, loader())
    return weights(module)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_checkpoint_has_written_values(on_ranks, tmp_path, num_ranks: int) -> None:
    expected = fit_and_save(1, str(tmp_path))
    for found in on_ranks(num_ranks, fit_and_save, num_ranks, str(tmp_path)):
        torch.testing.assert_close(found, expected)
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)["state_dict"]
    torch.testing.assert_close(saved, expected)


class Wrong(Momentum):
    def __init__(self, place: str, do: str) -> None:
        super().__init__("assign", place)
        self.update = WRONG[do]


def halve(module: Any) -> None:
    module.target[0].weight.data = module.target[0].weight.data.half()


def reshape(module: Any) -> None:
    module.target[0].weight.data = torch.zeros(7, 4)


def share(module: Any) -> None:
    module.target[0].weight.data = module.online[0].weight.data


def scale(module: Any) -> None:
    module.target[0].weight.data.mul_(0.9)


def outside(module: Any) -> None:
    module.target[0].weight.data.addmm_(torch.ones(5, 4), torch.ones(4, 4))


def deepcopy(module: Any) -> None:
    copy.deepcopy(module.scale)


WRONG = {function.__name__: function for function in (halve, reshape, share, scale, outside, deepcopy)}
REFUSED: dict[str, tuple[str, str, dict[str, Any], list[str]]] = {
    "dtype in a hook": ("halve", "on_train_batch_end", {}, ["target.0.weight.data", "float16", "[5, 4] float32"]),
    "shape in a step": ("reshape", "training_step", {}, ["target.0.weight.data", "[7, 4]", "[5, 4] float32"]),
    "shared in a step": ("share", "training_step", {}, ["target.0.weight.data", "copy_"]),
    "bf16": ("scale", "training_step", {"precision": "bf16-mixed"}, ["target.0.weight", "on_train_batch_end"]),
    "whole tensor": ("outside", "on_train_batch_end", {}, ["copy_(full)", "full_tensor"]),
    "deepcopy": ("deepcopy", "on_train_batch_end", {}, ["copy.deepcopy", "scale", "__init__"]),
}


def refusal(do: str, place: str, options: dict[str, Any]) -> str:
    try:
        fit(Wrong(place, do), strategy=ParalFSDPStrategy(units=is_scale), devices=2, **options)
    except (ConfigurationError, RuntimeError, AssertionError) as error:
        return str(error)
    return "trained"


def refusals() -> dict[str, str]:
    return {label: refusal(*case[:3]) for label, case in REFUSED.items()}


def test_writes_without_effect_are_refused_by_name(on_ranks) -> None:
    for said in on_ranks(2, refusals):
        for label, message in said.items():
            for part in REFUSED[label][3]:
                assert part in message, (label, part, message)
