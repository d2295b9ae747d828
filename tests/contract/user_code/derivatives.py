"""Rows about derivatives that a step computes itself: gradient penalties, forces, Jacobians, gradients per sample."""

from typing import Any

import torch
from torch import nn

from tests.contract.user_code.models import FEATURES, OUTPUTS, Supervised, validated
from tests.contract.user_code.rows import row


class Skipping(Supervised):
    """The output also depends on the inputs directly."""

    def __init__(self) -> None:
        super().__init__()
        self.skip = nn.Linear(FEATURES, OUTPUTS)

    def forward(self, x: Any) -> Any:
        return super().forward(x) + torch.tanh(self.skip(x))

    def slopes(self, inputs: Any, *, create_graph: bool) -> tuple[Any, Any]:
        inputs = inputs.clone().requires_grad_()
        outputs = self(inputs)
        (slopes,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=create_graph)
        return outputs, slopes


@row("derivatives by inputs, in the loss", names="autograd.grad")
class Penalty(Skipping):
    """loss + 0.1 * torch.autograd.grad(outputs.sum(), inputs, create_graph=True)[0].pow(2).mean(), with a skip."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        outputs, slopes = self.slopes(inputs, create_graph=True)
        return nn.functional.mse_loss(outputs, targets) + 0.1 * slopes.pow(2).mean()


@row("derivatives by inputs, in validation_step", loaders=validated, names="autograd.grad")
class Forces(Skipping):
    """Forces in validation_step: torch.autograd.grad of the energy by the positions, in torch.enable_grad()."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.inference_mode(False), torch.enable_grad():
            _, slopes = self.slopes(batch[0].clone(), create_graph=False)
        self.log("forces", slopes.pow(2).mean(), sync_dist=True)


@row("derivatives by inputs, by backward()", loaders=validated, names="backward")
class Backward(Skipping):
    """outputs.sum().backward() and inputs.grad in validation_step (saliency)."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.inference_mode(False), torch.enable_grad():
            inputs = batch[0].clone().requires_grad_()
            self(inputs).sum().backward()
        self.log("saliency", inputs.grad.abs().mean(), sync_dist=True)
        self.zero_grad()


@row("derivatives by all parameters", names="autograd.grad")
class ByAll(Supervised):
    """torch.autograd.grad(loss, self.parameters()) in training_step, of which a value is logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        gradients = torch.autograd.grad(loss, list(self.parameters()), retain_graph=True)
        self.log("gradient", sum(each.sum() for each in gradients), sync_dist=True)
        return loss


@row("derivatives along a direction, by dual tensors", names="forward.mode")
class Dual(Skipping):
    """torch.autograd.forward_ad.make_dual and unpack_dual in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(inputs, torch.ones_like(inputs))
            outputs, slopes = torch.autograd.forward_ad.unpack_dual(self(dual))
        return nn.functional.mse_loss(outputs, targets) + 0.1 * slopes.pow(2).mean()


@row("derivatives of each sample, by torch.func", since="2.13", names="autograd.grad|torch.func|outside of its unit")
class PerSample(Supervised):
    """vmap(grad(loss of functional_call)) over samples; the mean of their squared norms is logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        weights = {name: p.detach() for name, p in self.named_parameters()}

        def loss_of(weights: Any, x: Any, y: Any) -> Any:
            return nn.functional.mse_loss(torch.func.functional_call(self, weights, (x[None],)), y[None])

        gradients = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(weights, inputs, targets)
        square = sum(each.pow(2).reshape(len(each), -1).sum(dim=1) for each in gradients.values())
        self.log("norms", square.mean(), sync_dist=True)
        return self.loss(batch)


@row("derivatives by the head's weight")
class Balanced(Supervised):
    """torch.autograd.grad of two losses by the head's weight, of which values are logged (GradNorm)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        outputs = self(inputs)
        losses = [nn.functional.mse_loss(outputs, targets), nn.functional.l1_loss(outputs, targets)]
        for name, loss in zip("ab", losses, strict=True):
            (slope,) = torch.autograd.grad(loss, self.head.weight, retain_graph=True)
            self.log(f"slope of loss {name}", slope.sum(), sync_dist=True)
        return losses[0] + losses[1]


@row("derivatives of a network beside the blocks", names="autograd.grad")
class Beside(Supervised):
    """The gradient by inputs of another network, added to the inputs and to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.beside = nn.Linear(FEATURES, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        inputs = inputs.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(torch.tanh(self.beside(inputs)).sum(), inputs, create_graph=True)
        return nn.functional.mse_loss(self(inputs + slopes), targets) + 0.1 * slopes.square().mean()
