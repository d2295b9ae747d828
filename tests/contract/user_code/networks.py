"""Rows about whole networks: transformers, tied weights, GANs, unusual parameters, precision."""

from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from tests.contract.user_code.columns import RANKS
from tests.contract.user_code.models import FEATURES, OUTPUTS, WIDTH, Supervised, loader
from tests.contract.user_code.rows import add, row
from tests.contract.user_code.updates import OFFLOADED
from tests.models.blocks import MODULES
from tests.models.regression import samples
from tests.models.several_optimizers import KINDS, Plain
from tests.models.tokens import tokens


def of_tokens(rank: int, num_ranks: int) -> dict[str, Any]:
    return {"train_dataloaders": loader(*tokens(6).tensors, rank=rank, num_ranks=num_ranks)}


def of_pairs(rank: int, num_ranks: int) -> dict[str, Any]:
    return {"train_dataloaders": loader(*samples(4).tensors, rank=rank, num_ranks=num_ranks)}


PARALLEL = ("paral_dp", *(name for name in RANKS if name not in ("paral_pp", "paral_ddp_ring")))

for name, network in MODULES.items():
    add(f"network {name}", network.__doc__ or "", network, loaders=of_tokens, trainer={"gradient_clip_val": 0.5})


for name, several in KINDS.items():
    sentence = " ".join((several.__doc__ or "").split())
    offloaded = OFFLOADED if name in ("Plain", "ActorCritic") else ()
    add(
        f"optimizers, several: {name}",
        sentence,
        several,
        loaders=of_pairs,
        resumed=name == "Toggled",
        strategies=offloaded,
        names="froze a parameter|returned [23] optimizers",
    )


@row(
    "optimizers, several: a shared parameter", loaders=of_pairs, names=r"discriminator\.0\.weight|returned 2 optimizers"
)
class SharedParameter(Plain):
    """Two optimizers have the same parameter."""

    def configure_optimizers(self) -> Any:
        shared = self.discriminator[0].parameters()
        return [torch.optim.SGD(each, lr=0.1) for each in (self.discriminator.parameters(), shared)]


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.arange(FEATURES * 8.0).view(FEATURES, 8) / 50).sin().t())

    def forward(self, x: Any) -> Any:
        return nn.functional.linear(x, self.weight)


@row("parameters that are not contiguous")
class Strided(Supervised):
    """nn.Parameter(matrix.t()): trained, frozen, and built in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = Transposed()
        self.frozen = Transposed().requires_grad_(False)

    def configure_model(self) -> None:
        if not hasattr(self, "late"):
            self.late = Transposed()

    def loss(self, batch: Any) -> Any:
        inputs, _ = batch
        return super().loss(batch) + (self.linear(inputs) * self.late(inputs) + self.frozen(inputs) - 1).square().mean()


@row("parameter without elements", names="extra", apart=("optimizer_states: 0: state: 0 is missing",))
class Empty(Supervised):
    """nn.Parameter(torch.empty(0, 3)), used in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.empty(0, OUTPUTS))

    def forward(self, x: Any) -> Any:
        return torch.cat([super().forward(x), self.extra])


class Filter(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, dtype=torch.cfloat) * 0.3)

    def forward(self, x: Any) -> Any:
        return torch.fft.irfft(torch.fft.rfft(x, n=2 * len(self.weight) - 2) * self.weight, n=WIDTH)


@row("parameters that are complex", names="complex64")
class Filters(Supervised):
    """Fourier filters, as units: nn.Parameter(torch.randn(size, dtype=torch.cfloat)), trained by AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.blocks = nn.ModuleList(Filter(size) for size in (5, 4, 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@row(
    "trained buffer",
    names="trains the buffer codes",
    only=PARALLEL,
)
class TrainedBuffer(Supervised):
    """The optimizer has a buffer with requires_grad=True (a codebook)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.full((OUTPUTS,), 0.5, requires_grad=True))

    def forward(self, x: Any) -> Any:
        return super().forward(x) * self.codes

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), self.codes], lr=0.05)


@row("trained module outside of the module", names=r"shape \[1, 3\] that is not a parameter of TrainedOutside")
class TrainedOutside(Supervised):
    """The optimizer has parameters of a module in a list, which is no submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_away = [nn.Linear(3, 1)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.hidden_away[0].parameters()], lr=0.05)


class GraphKeeping(Metric):
    """A metric used as a loss, which keeps tensors with their graphs, as in forecasting libraries."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), "sum")

    def update(self, predicted: Any, target: Any) -> None:
        self.total = (predicted - target).abs().mean()

    def compute(self) -> Any:
        return self.total

    def forward(self, predicted: Any, target: Any) -> Any:
        self.reset()
        self._enable_grad = True
        self.update(predicted, target)
        self.parts = {"last": [self.total * 2]}
        return self.total


@row("loss by a metric")
class Forecaster(Supervised):
    """A torchmetrics metric as the loss, which keeps tensors with their graphs (pytorch-forecasting)."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = GraphKeeping()

    def loss(self, batch: Any) -> Any:
        return self.metric(self(batch[0]), batch[1])


for precision, tolerance, only in (
    ("64-true", 1e-6, ("paral_dp", "paral_ddp", "paral_fsdp")),
    ("bf16-true", 5e-2, ()),
    ("bf16-mixed", 2e-2, ()),
):
    add(
        f"precision {precision}",
        f"Trainer(precision={precision!r}), with clipping.",
        Supervised,
        trainer={"precision": precision, "gradient_clip_val": 0.5},
        tolerance=tolerance,
        only=only,
    )
