"""Code that uses shards while their unit is unsharded does the same as in one process."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_paral import ParalFSDPStrategy
from tests.running import quiet_trainer


class Sign(optim.SGD):
    """Steps on DTensors."""

    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.sub_(p.grad.sign() * self.param_groups[0]["lr"])


class Normed(optim.Adam):
    """Changes gradients by their norm, in a method that the step of torch calls."""

    def _init_group(self, group: Any, *args: Any) -> Any:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.div_(p.grad.norm() + 1e-3)
        return super()._init_group(group, *args)  # type: ignore[misc]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.row = nn.Parameter(torch.randn(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) + self.row


class Net(LightningModule):
    """One rank has no elements of some parameters; most belong to the root."""

    trainer_options: ClassVar[dict[str, Any]] = {}
    options: ClassVar[dict[str, Any]] = {}
    optimizer: Callable[..., optim.Optimizer] = optim.SGD
    is_manual = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = not self.is_manual
        self.stem = nn.Linear(4, 5)
        self.block = Block()
        self.head = nn.Linear(5, 3)
        self.gain = nn.Parameter(torch.ones(1, 3))
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.stem(x))) * self.gain

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=0.05)

    def on_fit_start(self) -> None:
        self.kept = (tuple(self.parameters()),)

    @property
    def held(self) -> Any:
        """The parameters that the optimizer has."""
        return self.trainer.optimizers[0].param_groups[0]["params"]

    def change(self) -> None:
        self.seen.append([p.norm().item() for p in self.held])
        for p in self.held:
            p.data.clamp_(-0.3, 0.3)
            p.data[0] *= 0.9
        torch._foreach_mul_([p.data for p in self.kept[0]], 0.9)
        self.seen.append([p.detach().abs().max() for p in self.held])

    def see_and_scale_gradients(self, parameters: Any) -> None:
        for p in parameters:
            self.seen.append(None if p.grad is None else float(p.grad.norm()))
            if p.grad is not None:
                p.grad.mul_(0.5)


class InStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            self.head.weight.mul_(0.9)
        self.change()
        return self.loss(batch)


class AfterTheLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.change()
        return loss


class ViewInStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for p in self.held:
            p.data[0] *= 0.9
        loss = self.loss(batch)
        for p in self.held:
            p.data.view(-1)[-1] = 0.1
        return loss


class BeforeZeroGrad(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.change()


class BeforeBackward(Net):
    def on_before_backward(self, loss: Any) -> None:
        self.change()


class Precise(BeforeZeroGrad):
    trainer_options: ClassVar[dict[str, Any]] = {"precision": "bf16-mixed"}


class Accumulates(Net):
    trainer_options: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2}

    def on_after_backward(self) -> None:
        self.see_and_scale_gradients(self.parameters())


class Checkpoints(Net):
    """Computes activations of modules of the root again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.stem, x, use_reentrant=False)
        return checkpoint(self.head, self.block(x), use_reentrant=False) * self.gain


class ChecksPointsOfStep(Net):
    """Computes a function again in the backward pass that calls the module and uses a weight by itself."""

    is_manual = True

    def loss(self, batch: Any) -> Tensor:
        found = checkpoint(lambda x: self(x) * self.gain, batch[0], use_reentrant=False)
        return nn.functional.mse_loss(found, batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.see_and_scale_gradients(self.parameters())
        optimizer.step()


class Transposes(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx == 1:
            self.square.data = self.square.data.t()
        return loss + self.square[0].sum()

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.randn(3, 3))


class RawManual(Net):
    is_manual = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raw: Any = self.optimizers(use_pl_optimizer=False)
        for _ in range(2):
            raw.zero_grad()
            self.manual_backward(self.loss(batch))
            self.seen.append(nn.utils.clip_grad_norm_(self.parameters(), 0.3))
            self.see_and_scale_gradients(self.parameters())
            if batch_idx == 1:
                self.gain.grad = None
            raw.step()
            self.seen.append(self.gain.detach().clone())
            self.change()
            self.seen.append(self.gain.detach().clone())


class RawSign(RawManual):
    optimizer = Sign


class Subclass(Net):
    optimizer = Normed


class StaysUnsharded(Net):
    """Units stay unsharded after validation, and after a call in a hook."""

    options: ClassVar[dict[str, Any]] = {"reshard_after_forward": False}
    optimizer = Sign

    def on_validation_epoch_end(self) -> None:
        self.change()

    def on_train_epoch_start(self) -> None:
        self.on_before_optimizer_step(None)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with torch.no_grad():
            self.seen.append(self(torch.ones(1, 4)))


class StaysUnshardedManually(StaysUnsharded):
    is_manual = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.on_before_optimizer_step(optimizer)
        optimizer.step()
        self.on_before_optimizer_step(optimizer)


class Unreduced(Net):
    """Plain backward passes of parameters of the root, which no unit notices, and of other tensors."""

    is_manual = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        (self.gain * 3).sum().backward()
        optimizer.zero_grad()
        self.seen.append(self.gain.grad is None)
        self.manual_backward(self.loss(batch))
        self.gain.pow(2).sum().backward()
        x = torch.ones(2, requires_grad=True)
        torch.autograd.grad(x.sum(), x)
        x.sum().backward()
        self.see_and_scale_gradients(self.parameters())
        optimizer.step()


class Assigns(Net):
    """Assigns gradients where there are none, and freezes what the optimizer has."""

    is_manual = True
    options: ClassVar[dict[str, Any]] = {"reshard_after_forward": False}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        for p in self.held:
            p.requires_grad_(batch_idx != 1 or p.dim() == 1)
        self.manual_backward(self.loss(batch))
        self.see_and_scale_gradients(self.parameters())
        optimizer.step()
        optimizer.zero_grad()
        for p in self.parameters():
            p.grad = torch.full_like(p, 0.1)
        optimizer.step()
        for p in self.parameters():
            p.grad = None


class BetweenPasses(Net):
    """Code between the forward and the backward pass sees the parameters and gradients that the optimizer has."""

    is_manual = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch) + self.loss(batch)
        self.see_and_scale_gradients(self.parameters())
        parameters = list(self.parameters())
        if batch_idx != 1:
            for p in parameters:
                p.grad = None
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        self.seen.append(nn.utils.clip_grad_norm_(parameters, 0.1))
        optimizer.step()


class BetweenPassesUnsharded(BetweenPasses):
    options: ClassVar[dict[str, Any]] = {"reshard_after_forward": False}


class AfterOthers(Net):
    """Reads gradients after the gradient by an input, and after the loss of a discriminator is frozen."""

    is_manual = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        x = batch[0].clone().requires_grad_()
        y = self(x)
        torch.autograd.grad(y.mean(), x, retain_graph=True)
        self.see_and_scale_gradients(self.parameters())
        self.block.requires_grad_(False)
        self.manual_backward(y.mean())
        self.block.requires_grad_(True)
        self.manual_backward(self.head(checkpoint(self.block, self.stem(x), use_reentrant=False)).mean())
        self.see_and_scale_gradients(self.parameters())
        optimizer.step()


class AddsInStep(Net):
    def configure_optimizers(self) -> Any:
        return optim.SGD([*self.stem.parameters(), *self.block.parameters()], lr=0.05)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx == 1 and self.current_epoch == 0:
            self.trainer.optimizers[0].add_param_group({"params": [self.gain, self.head.bias]})
        return loss


class AddsInManualStep(AddsInStep):
    is_manual = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class OptimizesItself(Block):
    def optimizer(self) -> optim.Optimizer:
        return optim.SGD([{"params": self.linear.parameters()}, {"params": self.row, "lr": 0.01}], lr=0.05)


class FromMethod(Net):
    """A method of a unit, which is unsharded there, creates the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.block = OptimizesItself()

    def configure_optimizers(self) -> Any:
        return self.block.optimizer()


class OtherMethods(Block):
    def scaled(self, x: Tensor) -> Tensor:
        return self(torch.tanh(self.linear(x)) * self.row)

    def weight(self) -> Tensor:
        return self.linear.weight


class CallsMethods(Net):
    """A method of a unit uses its weights before and after its forward pass, and another returns one."""

    def __init__(self) -> None:
        super().__init__()
        self.block = OtherMethods()

    def loss(self, batch: Any) -> Tensor:
        found = self.head(self.block.scaled(self.stem(batch[0]))) * self.gain
        return nn.functional.mse_loss(found, batch[1]) + self.block.weight().square().mean()


class CallsMethodsManually(CallsMethods):
    is_manual = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.see_and_scale_gradients(self.parameters())
        optimizer.step()


class ReturnsWeights(Block):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return {"x": super().forward(x), "weights": (self.linear.weight, self.row[0])}


class Returned(Net):
    """A unit and the steps return weights, whose memory is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.block = ReturnsWeights()

    def forward(self, x: Tensor) -> Tensor:
        found = self.block(self.stem(x))
        weight, row = found["weights"]
        return self.head(found["x"] @ weight.t() + row) * self.gain

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "gain": self.gain, "row": self.head.weight.detach()[0]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs["gain"].shape)
        outputs["row"].sum().item()  # the values are those of before the step, which in one process share memory

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return [self.head.weight, self.block(self.stem(batch[0]))["weights"]]

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append([outputs[0].sum().item(), *(float(each.sum()) for each in outputs[1])])


class ReturnedManually(Returned):
    is_manual = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) + self.block(self.stem(batch[0]))["weights"][0].square().sum())
        self.see_and_scale_gradients(self.parameters())
        optimizer.step()
        return {"gain": self.gain, "row": self.head.weight.detach()[0]}


class Distributes(Net):
    """The module returns an object that has a view of a weight."""

    is_manual = True

    def forward(self, x: Tensor) -> Any:
        return torch.distributions.Normal(self.head(self.block(self.stem(x))), self.gain)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(-self(batch[0]).log_prob(batch[1]).mean())
        self.see_and_scale_gradients(self.parameters())
        optimizer.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self(batch[0]).scale.mean().item())


class Distribution(Block):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return torch.distributions.Normal(super().forward(x) * self.row, self.row)


class FromDistribution(Net):
    """A unit returns an object whose tensors are differentiated."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Distribution()
        self.block.row.data.abs_().add_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        found = self.block(self.stem(x))
        return self.head(found.loc * found.scale) * self.gain


class Freezes(Net):
    """Freezes unsharded parameters of the root, before and after their use."""

    optimizer = optim.Adam

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.gain.requires_grad_(batch_idx % 2 == 0)
        loss = self.loss(batch)
        self.head.bias.requires_grad_(batch_idx % 2 == 0)
        return loss


class AssignsThenWrites(Net):
    """Assigns the gradient of an unsharded parameter, and then writes to a shard of its unit."""

    is_manual = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.gain.grad = torch.full_like(self.gain, 0.3)
        self.kept[0][0].data.mul_(0.9)
        optimizer.step()


class ReadsOnOneRank(Net):
    """Reads local tensors, which is not collective, while their unit is unsharded."""

    def on_before_backward(self, loss: Any) -> None:
        if self.trainer.world_size > 1 and self.trainer.is_global_zero:
            for p in self.held:
                p.to_local().norm()


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.block)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.block, optimizer, lr=0.03)


class Unfreezes(Net):
    options: ClassVar[dict[str, Any]] = {"reshard_after_forward": False}

    def configure_callbacks(self) -> Any:
        return [Unfreeze()]


CASES = (
    InStep, AfterTheLoss, ViewInStep, BeforeZeroGrad, BeforeBackward, Precise, Accumulates, Checkpoints, Transposes,
    RawManual, RawSign, Subclass, StaysUnsharded, StaysUnshardedManually, Unreduced, Assigns, Unfreezes, Freezes,
    AssignsThenWrites, ReadsOnOneRank, BetweenPasses, BetweenPassesUnsharded, AfterOthers, AddsInStep,
    AddsInManualStep, FromMethod, CallsMethods, CallsMethodsManually, ChecksPointsOfStep, Returned,
    ReturnedManually, Distributes, FromDistribution,
)  # fmt: skip


def _is_block(name: str, module: nn.Module) -> bool:
    return isinstance(module, Block)


def fit(name: str, units: Any, num_ranks: int) -> list[Any]:
    case = next(each for each in CASES if each.__name__ == name)
    torch.manual_seed(0)
    module = case()
    strategy = "auto" if num_ranks == 1 else ParalFSDPStrategy(units=units, **case.options)
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(24, 4, generator=generator), torch.randn(24, 3, generator=generator))
    loader = DataLoader(rows, 8 // num_ranks)
    options: ClassVar[dict[str, Any]] = {"max_epochs": 2, "num_sanity_val_steps": 0} | case.trainer_options
    quiet_trainer(devices=num_ranks, strategy=strategy, **options).fit(module, loader, loader)
    return [[p.detach() for p in module.parameters()], full(module.seen)]


def full(value: Any) -> Any:
    if isinstance(value, list):
        return [full(each) for each in value]
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone() if isinstance(value, Tensor) else value


@pytest.mark.parametrize("units", [_is_block, "auto"])
@pytest.mark.parametrize("name", [each.__name__ for each in CASES])
def test_shards_are_used_as_their_unsharded_values(on_ranks, name: str, units: Any) -> None:
    expected = fit(name, None, 1)
    tolerance = 0.02 if name == "Precise" else 1e-4
    for found in on_ranks(2, fit, name, units, 2):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
