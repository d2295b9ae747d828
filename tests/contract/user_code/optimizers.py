"""Rows about optimizers: all of torch.optim, and optimizers that use a parameter's shape or norm."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from tests.contract.user_code.models import Manual, Supervised
from tests.contract.user_code.rows import add, row

MATRICES = ("Muon",)


def matrices(module: torch.nn.Module) -> list[Any]:
    return [p for p in module.parameters() if p.dim() == 2]


def optimized(make: Callable[[Any], Any]) -> type[Supervised]:
    """Return a module that is trained by what `make` makes of it."""
    return type("Optimized", (Supervised,), {"configure_optimizers": lambda self: make(self)})


def add_optimizer(label: str, make: Callable[[Any], Any], **options: Any) -> None:
    names = re.escape(label.removeprefix("torch.optim."))
    add(f"optimizer {label}", f"{label} in configure_optimizers", optimized(make), names=names, **options)


LEARNING_RATES = {"Adadelta": 1.0, "Adafactor": 0.05, "LBFGS": 0.1, "Rprop": 1e-3, "ASGD": 0.05, "SGD": 0.05}
OPTIONS = {"LBFGS": {"max_iter": 3, "history_size": 2}}  # differences of gradients amplify rounding errors
IN_TORCH = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer and name != "SparseAdam"
)
for name in IN_TORCH:
    add_optimizer(
        f"torch.optim.{name}",
        lambda module, name=name: getattr(torch.optim, name)(
            matrices(module) if name in MATRICES else module.parameters(),
            lr=LEARNING_RATES.get(name, 1e-2),
            **OPTIONS.get(name, {}),
        ),
        tolerance=1e-3 if name == "LBFGS" else 1e-5,
    )


def adamw_variant(**options: Any) -> Callable[[Any], Any]:
    return lambda module: torch.optim.AdamW(module.parameters(), lr=1e-2, **options)


add_optimizer("AdamW(amsgrad=True)", adamw_variant(amsgrad=True))
add_optimizer("AdamW(foreach=True)", adamw_variant(foreach=True))
add_optimizer("AdamW(fused=True)", adamw_variant(fused=True))
add_optimizer("AdamW(lr=tensor)", lambda module: torch.optim.AdamW(module.parameters(), lr=torch.tensor(1e-2)))


class Lion(Optimizer):
    """Elementwise: the sign of an interpolation (the usual implementation of lucidrains)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in filter(lambda p: p.grad is not None, group["params"]):
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(average.clone().mul_(first).add(p.grad, alpha=1 - first).sign_(), alpha=-group["lr"])
                average.mul_(second).add_(p.grad, alpha=1 - second)
        return loss


class Lamb(torch.optim.AdamW):
    """AdamW whose step is scaled by |p| / |step| of each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        before = {p: p.detach().clone() for group in self.param_groups for p in group["params"] if p.grad is not None}
        super().step()
        for p, old in before.items():
            change = p - old
            p.copy_(old + 0.05 * change * old.norm() / change.norm().clamp(min=1e-8))
        return loss


for custom in (Lion, Lamb):
    doc = " ".join((custom.__doc__ or "").split())
    add(
        f"optimizer of one's own, {custom.__name__}",
        doc,
        optimized(lambda module, custom=custom: custom(module.parameters(), lr=1e-2)),
        names=custom.__name__,
    )


def layerwise(module: Any) -> Any:
    groups = [
        {"params": [p], "lr": 0.01 * 0.9**number, "name": name}
        for number, (name, p) in enumerate(module.named_parameters())
    ]
    return torch.optim.AdamW(groups)


add("optimizer group for every parameter", "A learning rate per layer, a group each.", optimized(layerwise))


add(
    "optimizer with named_parameters",
    "torch.optim.AdamW(self.named_parameters()).",
    optimized(lambda module: torch.optim.AdamW(module.named_parameters(), lr=1e-2)),
)


@row("optimizer hyper-parameters changed in a hook")
class ChangedGroups(Supervised):
    """group["lr"] and group["weight_decay"] written in on_train_batch_start through self.optimizers()."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.01 / (1 + batch_idx)
            group["weight_decay"] = 0.1 * batch_idx


@row("optimizer_step, every second batch", names="zero_grad")
class EverySecond(Supervised):
    """optimizer_step overridden: steps every second batch, else calls the closure alone."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


@row("optimizer_step, closure first")
class ClosureFirst(Supervised):
    """optimizer_step overridden: optimizer_closure(), then optimizer.step() without a closure."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()
        optimizer.step()


@row("optimizer SAM in manual optimization", names=r"parameter\.grad")
class Sam(Manual):
    """Sharpness-aware minimization: p.add_(e), a second backward, p.sub_(e), step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        with torch.no_grad():
            moves = [(p, 0.05 * p.grad) for p in self.parameters()]
            for p, move in moves:
                p.add_(move)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p, move in moves:
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss


@row("optimizer state read in a hook", names=r"optimizer\.state")
class ReadState(Supervised):
    """optimizer.state[p]["exp_avg"].norm() in on_train_batch_end."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_batch_end(self, *args: Any) -> None:
        state = self.optimizers().state
        self.seen.append([float(state[p]["exp_avg"].norm()) for p in self.parameters()])
