"""Rows about building and calling modules: tying, parametrizations, penalties, checkpointing, teachers, RNNs."""

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.contract.user_code.models import FEATURES, OUTPUTS, WIDTH, Manual, Supervised
from tests.contract.user_code.rows import add, row
from tests.models.blocks import Adapter


def changed(change: Any) -> type[Supervised]:
    """Return a module that `change` is applied to when it is built."""

    class Changed(Supervised):
        def __init__(self) -> None:
            super().__init__()
            change(self)

    return Changed


NORMS: dict[str, tuple[str, Any]] = {
    **{
        f"parametrizations.{name}": (f"parametrizations.{name} of layers", getattr(parametrizations, name))
        for name in ("weight_norm", "spectral_norm", "orthogonal")
    },
    "the old spectral_norm": ("spectral_norm, by forward hooks", nn.utils.spectral_norm),
}
for name, (said, normalize) in NORMS.items():
    add(
        f"module with {name}",
        f"torch.nn.utils.{said}.",
        changed(lambda m, f=normalize: [f(layer) for layer in (m.head, m.backbone.blocks[0].layer)]),
        reference="ddp" if "spectral" in name else "auto",
    )


@row("module tied by functional use")
class TiedByUse(Supervised):
    """F.linear(x, self.backbone.stem.weight.t()) of another module's weight (an autoencoder)."""

    def loss(self, batch: Any) -> Any:
        inputs, targets = batch
        features = self.backbone(inputs)
        rebuilt = nn.functional.linear(features, self.backbone.stem.weight.t())
        return nn.functional.mse_loss(rebuilt, inputs) + nn.functional.mse_loss(self.head(features), targets)


@row("module with a penalty on all parameters", tolerance=2e-5, names="backbone.blocks.0")
class PenaltyOnAll(Supervised):
    """loss + 1e-2 * sum(p.pow(2).sum() for p in self.parameters()) in training_step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 1e-2 * sum(p.pow(2).sum() for p in self.parameters())


@row("module with a penalty on the head's weight")
class PenaltyOnHead(Supervised):
    """loss + 1e-2 * self.head.weight.abs().sum() in training_step (L1)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 1e-2 * self.head.weight.abs().sum()


@row("module with a penalty alone", names="[Gg]radients")
class PenaltyAlone(Manual):
    """A manual step of the penalty sum(p.norm()) alone, without a forward pass."""

    def loss(self, batch: Any) -> Any:
        if self.global_step % 2:
            return 0.01 * sum(p.square().sum() for p in self.parameters())
        return super().loss(batch)


@row("module's weights read and logged in hooks")
class LoggedWeights(Supervised):
    """self.log("w", self.head.weight.mean()) and of a block's weight, in on_train_batch_end and the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("in_step", self.head.weight.detach().norm())
        self.log("block_in_step", self.backbone.blocks[0].layer.weight.detach().norm())
        return self.loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("w", self.head.weight.mean())
        self.log("block", self.backbone.blocks[0].layer.weight.abs().sum())


@row("module's state_dict read in a hook")
class ReadState(Supervised):
    """{k: v.cpu().clone() for k, v in self.state_dict().items()} in on_train_epoch_end; sums of it."""

    def on_train_epoch_end(self) -> None:
        state = {name: value.cpu().clone() for name, value in self.state_dict().items()}
        self.seen.append({name: [list(value.shape), float(value.sum())] for name, value in state.items()})


@row("module checkpointed by torch.utils.checkpoint")
class Checkpointed(Supervised):
    """torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)."""

    use_reentrant = False

    def forward(self, x: Any) -> Any:
        x = self.backbone.stem(x)
        for block in self.backbone.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x * self.backbone.gain / self.backbone.temperature)


@row("module checkpointed, reentrant")
class Reentrant(Checkpointed):
    """torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)."""

    use_reentrant = True


@row("module with a teacher hidden in a list")
class HiddenTeacher(Supervised):
    """self.teacher = [module]: hidden from parameters() and state_dict()."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [copy.deepcopy(self.backbone).requires_grad_(False)]

    def loss(self, batch: Any) -> Any:
        inputs, _ = batch
        with torch.no_grad():
            aims = self.teacher[0](inputs)
        return nn.functional.mse_loss(self.backbone(inputs), aims + 0.1) + super().loss(batch)

    def on_train_batch_end(self, *args: Any) -> None:
        for q, p in zip(self.teacher[0].parameters(), self.backbone.parameters(), strict=True):
            q.data.mul_(0.5).add_(0.5 * p.data)


@row("module copied during the run", names="deepcopy")
class CopiedInEpoch(Supervised):
    """copy.deepcopy(self) or of a part in on_train_epoch_end, its sum read (a snapshot of the best)."""

    def on_train_epoch_end(self) -> None:
        best = copy.deepcopy(self.backbone)
        self.seen.append([float(p.detach().sum()) for p in best.parameters()])


@row("module with an RNN")
class Recurrent(Supervised):
    """nn.LSTM with two layers, and nn.GRUCell in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, WIDTH, num_layers=2, batch_first=True)
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        features, _ = self.lstm(x.unsqueeze(2))
        state = torch.zeros(len(x), WIDTH)
        for step in range(FEATURES):
            state = self.cell(features[:, step], state)
        return super().forward(x) + self.head(state)


@row("module with LoRA merged and unmerged")
class MergedLora(Supervised):
    """base.weight.data += up @ down in on_train_epoch_end."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)
        for block in self.backbone.blocks:
            block.layer = Adapter(block.layer)

    def on_train_epoch_end(self) -> None:
        for block in self.backbone.blocks:
            block.layer.layer.weight.data += block.layer.up @ block.layer.down


@row("module whose input is changed in place", names="InPlaceInput")
class InPlaceInput(Supervised):
    """inputs.mul_(2) in training_step; relu_(x) inside."""

    def loss(self, batch: Any) -> Any:
        inputs, targets = batch
        inputs.mul_(2).clamp_(-1, 1)
        features = torch.relu_(self.backbone(inputs))
        return nn.functional.mse_loss(self.head(features), targets)


@row("module whose blocks change inputs in place")
class InPlaceBlocks(Supervised):
    """x += block(x), a unit whose output is changed in place outside."""

    def forward(self, x: Any) -> Any:
        x = self.backbone.stem(x)
        for block in self.backbone.blocks:
            x = block(x)
            x += 1
            x = x.mul_(0.5)
        return self.head(x * self.backbone.gain / self.backbone.temperature)


@row("module with forward hooks")
class ForwardHooks(Supervised):
    """register_forward_hook that changes and records outputs, register_forward_pre_hook, on blocks and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.blocks[0].register_forward_hook(lambda module, args, output: output * 0.5)
        self.backbone.blocks[1].layer.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
        self.head.register_forward_hook(lambda module, args, output: output.tanh())


@row("module with a forward hook that reads the weight")
class WeightHook(Supervised):
    """register_forward_hook that computes with module.weight (activation statistics, equalized learning rate)."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.head, self.backbone.blocks[0].layer):
            layer.register_forward_hook(lambda module, args, output: output * module.weight.norm())


@row("module with backward hooks")
class BackwardHooks(Supervised):
    """register_full_backward_hook that scales grad_input, register_full_backward_pre_hook."""

    def __init__(self) -> None:
        super().__init__()
        scale = lambda module, slopes, _: tuple(s * 0.5 for s in slopes)  # noqa: E731
        self.backbone.blocks[1].register_full_backward_hook(scale)
        self.head.register_full_backward_hook(scale)
        self.backbone.blocks[0].register_full_backward_pre_hook(lambda module, slopes: tuple(s * 2 for s in slopes))


@row("module called functionally", reference="ddp", names="[Ff]unctional")
class Functional(Supervised):
    """torch.func.functional_call(self.head, changed weights, x) (MAML's inner step)."""

    def loss(self, batch: Any) -> Any:
        inputs, targets = batch
        features = self.backbone(inputs)
        weights = dict(self.head.named_parameters())
        inner = nn.functional.mse_loss(torch.func.functional_call(self.head, weights, features), targets)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: w - 0.1 * s for (name, w), s in zip(weights.items(), slopes, strict=True)}
        return nn.functional.mse_loss(torch.func.functional_call(self.head, moved, features), targets)


@row("module with ParameterList and ParameterDict")
class Lists(Supervised):
    """nn.ParameterList, nn.ParameterDict, an expanded token parameter (ViT's cls token), parameters on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(WIDTH) * i for i in (1, 2)])
        self.shifts = nn.ParameterDict({"a": torch.zeros(WIDTH), "b": torch.tensor(0.1)})
        self.token = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Any) -> Any:
        features = self.backbone(x) * self.scales[0] + self.scales[1] + self.shifts["a"] * self.shifts["b"]
        return self.head(features + self.token.expand(len(x), -1))


class Embedded(Supervised):
    """nn.Embedding(padding_idx=0), and max_norm, which renormalizes weights in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH, padding_idx=0)

    def forward(self, x: Any) -> Any:
        numbers = (x * 2).long().clamp(-4, 4) + 4
        return super().forward(x) + self.head(self.embedding(numbers).mean(dim=1))


@row("module with an embedding and max_norm", reference="auto", names="max_norm")
class MaxNorm(Embedded):
    """nn.Embedding(max_norm=...), which writes its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH, max_norm=1.0)


@row("module with a sparse embedding", names="sparse")
class SparseEmbedding(Embedded):
    """nn.Embedding(sparse=True), whose gradient is a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH, sparse=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@row("module with a contrastive loss over all ranks", names="all_gather")
class Contrastive(Supervised):
    """InfoNCE over self.all_gather(features, sync_grads=True)."""

    def loss(self, batch: Any) -> Any:
        inputs, _ = batch
        first = self.all_gather(self.backbone(inputs), sync_grads=True).reshape(-1, WIDTH)
        second = self.all_gather(self.backbone(inputs * 0.9), sync_grads=True).reshape(-1, WIDTH)
        return nn.functional.cross_entropy(first @ second.T, torch.arange(len(first))) + super().loss(batch)


@row("module with attention")
class Attention(Supervised):
    """nn.MultiheadAttention and nn.TransformerEncoderLayer without dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH + 1, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.project = nn.Linear(1, WIDTH + 1)
        self.last = nn.Linear(WIDTH + 1, OUTPUTS)

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.last(self.encoder(self.project(x.unsqueeze(2))).mean(dim=1))


@row("module cast in __init__", names="float64")
class Double(Supervised):
    """self.double() of a part: parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, OUTPUTS).double()

    def forward(self, x: Any) -> Any:
        features = self.backbone(x)
        return self.head(features) + self.wide(features.double()).float()
