import torch
from torch import nn
from torch.nn.utils import parametrizations

from lightning_paral.engines.dp.metrics import MetricCopies
from lightning_paral.engines.dp.replicate import Replicas

CPU, META = torch.device("cpu"), torch.device("meta")


def replicate(module: nn.Module, num: int = 1, device: torch.device = CPU) -> Replicas:
    return Replicas(module, [device] * num, [MetricCopies(device) for _ in range(num)], lambda: None)


class Parts(nn.Module):
    """Holds parameters, buffers and functions in every way that modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.same = self.first
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.factors = nn.ParameterList([nn.Parameter(torch.rand(4)) for _ in range(2)])
        self.named = nn.ParameterDict({"gain": torch.rand(4)})
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("hidden", torch.ones(4), persistent=False)
        self.chosen = self.scale
        self.seen: list[torch.Tensor] = []

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scalar

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x)
        x = self.normed(self.frozen(self.tied(self.same(self.first(x)))))
        x, _ = self.recurrent(x[:, None])
        x = self.norm(x[:, 0]) + self.shift + self.hidden
        penalty = sum(parameter.square().sum() for parameter in self.parameters()) - 2
        return self.chosen(x) * self.factors[0] * self.factors[1] * self.named["gain"] + 0.01 * penalty


def test_replica_computes_as_the_master_and_the_master_accumulates_gradients() -> None:
    torch.manual_seed(0)
    master, x = Parts(), torch.randn(6, 4)
    master(x).square().sum().backward()
    alone = {name: parameter.grad for name, parameter in master.named_parameters()}
    master.zero_grad()
    master.norm.reset_running_stats()

    replicas = replicate(master, 2).modules
    outputs = [module(x) for module in (master, *replicas)]
    sum(output.square().sum() for output in outputs).backward()

    for output in outputs:
        assert torch.equal(output, outputs[0])
    for name, parameter in master.named_parameters():
        if name.startswith("frozen"):
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, 3 * alone[name], msg=name)
    assert len(master.seen) == 4  # other attributes are shared


def test_replica_has_its_own_parameters_and_buffers_under_the_same_names() -> None:
    master = Parts()

    (replica,) = replicate(master).modules

    for ours, theirs in (
        (dict(master.named_parameters()), dict(replica.named_parameters())),
        (dict(master.named_buffers()), dict(replica.named_buffers())),
    ):
        assert list(ours) == list(theirs)
        for name in ours:
            assert torch.equal(ours[name], theirs[name])
            assert ours[name].data_ptr() != theirs[name].data_ptr(), name
            assert ours[name].requires_grad == theirs[name].requires_grad
    assert replica.tied.weight is replica.first.weight
    assert replica.same is replica.first


def test_sparse_gradients_stay_sparse() -> None:
    master = nn.Embedding(5, 2, sparse=True)
    indices = torch.tensor([1, 1, 3])

    for replica in replicate(master, 2).modules:
        replica(indices).sum().backward()

    assert master.weight.grad.is_sparse
    assert master.weight.grad.to_dense().sum(dim=1).tolist() == [0, 8, 0, 4, 0]
