"""Rows about reading and writing gradients in hooks: norms, clipping, noise, masks."""

from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_

from tests.contract.user_code.columns import RANKS
from tests.contract.user_code.models import Manual, Supervised
from tests.contract.user_code.places import acting
from tests.contract.user_code.rows import add, row

GRAD = r"parameter\.grad"
"""What refusals of most rows name."""


@row("gradient norms logged", names=GRAD)
class LoggedNorms(Supervised):
    """self.log_dict(grad_norm(self, 2)) in on_before_optimizer_step (Lightning's documentation)."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


def read(module: Any) -> None:
    module.seen.append([float(p.grad.norm()) for p in module.parameters() if p.grad is not None])


ACCUMULATING = {"trainer": {"accumulate_grad_batches": 2}}
READ: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gradient norms read": ("on_after_backward", "p.grad.norm() of every parameter", {}),
    "gradients read in on_train_batch_end": ("on_train_batch_end", "p.grad.norm(), before the next zero_grad,", {}),
    "gradients by accumulation with hooks": (
        "on_before_optimizer_step",
        "accumulate_grad_batches=2, with p.grad.norm() read",
        ACCUMULATING,
    ),
    "gradients read while they accumulate": (
        "on_after_backward",
        "accumulate_grad_batches=2, with p.grad.norm() of every batch read",
        ACCUMULATING | {"reference": "ddp"},
    ),
}
for label, (place, said, options) in READ.items():
    add(label, f"{said} in {place}.", names=GRAD, **acting(Supervised, place, read), **options)


@row("gradients clamped", names=GRAD)
class Clamped(Supervised):
    """p.grad.clamp_(-0.05, 0.05) in on_before_optimizer_step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.clamp_(-0.05, 0.05)


@row("gradients replaced", names=GRAD)
class Replaced(Supervised):
    """p.grad = p.grad.sign() * 0.1 (and p.grad.data = ...) in on_before_optimizer_step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for number, p in enumerate(self.parameters()):
            if number % 2:
                p.grad = p.grad.sign() * 0.1
            else:
                p.grad.data = p.grad.data / 2


@row("gradient rows set to zero", names=GRAD)
class ZeroedRows(Supervised):
    """p.grad[0].zero_() and p.grad[:, 1] = 0 in on_after_backward (frozen rows of an embedding)."""

    def on_after_backward(self) -> None:
        self.head.weight.grad[0].zero_()
        self.backbone.blocks[0].layer.weight.grad[:, 1] = 0


@row("gradients set to None", names=GRAD)
class SetToNone(Supervised):
    """p.grad = None for a layer in on_after_backward (skip it in this step)."""

    def on_after_backward(self) -> None:
        if self.global_step % 2:
            for p in self.backbone.blocks[0].parameters():
                p.grad = None
            self.head.bias.grad = None


def _norm(parameters: Any) -> Any:
    return clip_grad_norm_(parameters, 0.3)


@row("clip_grad_norm_ of self.parameters()", names=GRAD)
class ClipParameters(Supervised):
    """clip_grad_norm_(self.parameters(), ...) in configure_gradient_clipping."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append(float(_norm(self.parameters())))


@row("clip_grad_norm_ of optimizer.param_groups", names=GRAD)
class ClipGroups(Supervised):
    """clip_grad_norm_(group["params"], ...) over optimizer.param_groups in configure_gradient_clipping."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            self.seen.append(float(_norm(group["params"])))


@row("self.clip_gradients in configure_gradient_clipping")
class ClipBySelf(Supervised):
    """self.clip_gradients(optimizer, ...) in configure_gradient_clipping, by a value that changes."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2 + 0.1 * self.global_step, gradient_clip_algorithm="norm")


BETWEEN: dict[str, tuple[str, Any]] = {
    "gradient norm read": (
        "p.grad.norm()",
        lambda module, _: module.seen.append([float(p.grad.norm()) for p in module.parameters()]),
    ),
    "clip_grad_norm_": ("clip_grad_norm_(self.parameters(), ...)", lambda module, _: _norm(module.parameters())),
}
for label, (said, act) in BETWEEN.items():
    made = type("Acting", (Manual,), {"between": act})
    add(f"{label} in manual optimization", f"{said} between manual_backward and optimizer.step().", made, names=GRAD)


@row("gradient accumulation, not automatic")
class ManualAccumulation(Manual):
    """Manual optimization that steps every second batch, and at the last."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss / 2)
        if batch_idx % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
        return loss


@row("gradient hook of a parameter, masking", names="MaskingHook|register_hook")
class MaskingHook(Supervised):
    """p.register_hook(lambda g: g * mask) with a mask of the parameter's shape (rows of an embedding frozen)."""

    def __init__(self) -> None:
        super().__init__()
        for p in [self.head.weight, self.backbone.blocks[0].layer.weight]:
            mask = (torch.arange(p.numel()).view_as(p) % 3 > 0).float()
            p.register_hook(lambda grad, mask=mask: grad * mask)


row(
    "gradient hook of a parameter, accumulating",
    sentence="A mask of the parameter's shape in p.register_hook, with accumulate_grad_batches=2.",
    names="MaskingHook|register_hook",
    **ACCUMULATING,
)(MaskingHook)


def halve(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


@row("gradient hook after accumulation", names=r"accumulate_grad_hook|parameter\.grad")
class PostHook(Supervised):
    """p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))."""

    def __init__(self) -> None:
        super().__init__()
        for p in [self.head.weight, self.backbone.blocks[0].layer.weight]:
            p.register_post_accumulate_grad_hook(halve)


@row("gradient hooks added and removed", only=RANKS, names="ChangingHooks|register_hook")
class ChangingHooks(Supervised):
    """p.register_hook in __init__, in on_train_start and in the first step; some change gradients, one is removed."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda grad: grad * 0.5)
        self.removed = self.head.weight.register_hook(lambda grad: grad * 0.0)

    def on_train_start(self) -> None:
        self.removed.remove()
        self.backbone.blocks[1].layer.weight.register_hook(lambda grad: grad * 0.7)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not batch_idx:
            self.backbone.blocks[0].layer.bias.register_hook(lambda grad: grad + 0.01)
        return self.loss(batch)


@row("gradient hook of an activation")
class ActivationHook(Supervised):
    """tensor.register_hook(lambda g: g * 0.5) and retain_grad() of an activation in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, targets = batch
        features = self.backbone(inputs)
        features.register_hook(lambda grad: grad * 0.5)
        return torch.nn.functional.mse_loss(self.head(features), targets)


@row("zero_grad in the step")
class ZeroGrad(Supervised):
    """self.zero_grad() and optimizer.zero_grad(set_to_none=False) by hand in automatic optimization."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.zero_grad()
        return self.loss(batch)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@row("backward overridden")
class OwnBackward(Supervised):
    """def backward(self, loss): (loss * 2).backward()."""

    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        (loss * 2).backward()


@row("backward twice by retain_graph", names="retain_graph")
class Twice(Manual):
    """self.manual_backward(a, retain_graph=True); self.manual_backward(b) of one graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        inputs, targets = batch
        outputs = self(inputs)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(outputs, targets)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.1 * outputs.square().mean())
        optimizer.step()
        return loss


@row("loss.backward() in manual optimization", names="backward")
class PlainBackward(Manual):
    """loss.backward() instead of self.manual_backward(loss)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss
