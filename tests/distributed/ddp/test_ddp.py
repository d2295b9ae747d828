"""Features that `ParalDDPStrategy` adds to Lightning's DDP."""

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_paral import ConfigurationError, ParalDDPStrategy
from lightning_paral.comm import ALL_REDUCE, count_traffic, ring_all_reduce
from lightning_paral.diagnostics.rank_pool import RankError
from tests.models.regression import FEATURES, Regression, fit_regression, regression_data
from tests.running import quiet_trainer


class Features(LightningModule):
    """Base class of modules that train on rows of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last(self.first(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rows(num: int = 8) -> DataLoader[Tensor]:
    return DataLoader(torch.arange(num * FEATURES, dtype=torch.float32).view(num, FEATURES) / 10, batch_size=2)


class WaitsForTheFirstBucket(Features):
    """Its backward pass waits after the last layer until the reduction of that layer's bucket has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.reduction_began = threading.Event()
        self.overlapped: list[bool] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.first(batch)
        if batch_idx > 1:  # DDP arranges its buckets during the first step
            self.reduction_began.clear()
            hidden.register_hook(lambda gradient: self.overlapped.append(self.reduction_began.wait(timeout=10)))
        return self.last(hidden).square().mean()


def fit_while_waiting_for_the_first_bucket() -> list[bool]:
    model = WaitsForTheFirstBucket()

    def announce(tensor, group=None, **options):
        model.reduction_began.set()
        return ring_all_reduce(tensor, group, **options)

    with mock.patch.dict(ALL_REDUCE, ring=announce):
        strategy = ParalDDPStrategy(all_reduce="ring", bucket_cap_mb=0.00001)
        quiet_trainer(strategy=strategy, devices=2, max_epochs=1).fit(model, rows(32))
    return model.overlapped


def test_reduction_overlaps_the_backward_pass(on_ranks) -> None:
    for overlapped in on_ranks(2, fit_while_waiting_for_the_first_bucket):
        assert len(overlapped) > 2
        assert all(overlapped)


def traffic_of_fit(wire_dtype: str | None) -> tuple[list[float], int]:
    with count_traffic() as traffic:
        losses, _ = fit_regression(20, 1, 2, strategy=ParalDDPStrategy(all_reduce="ring", wire_dtype=wire_dtype))
    return losses, traffic.payload_bytes


@pytest.mark.parametrize("wire_dtype", ["bf16", "fp16"])
def test_narrow_wire_halves_the_traffic_of_a_training_step(on_ranks, wire_dtype: str) -> None:
    num_parameters = sum(parameter.numel() for parameter in Regression().parameters())

    for (exact, wide_bytes), (rounded, narrow_bytes) in zip(
        on_ranks(2, traffic_of_fit, None), on_ranks(2, traffic_of_fit, wire_dtype), strict=True
    ):
        assert wide_bytes == 20 * 4 * num_parameters  # 2(N-1)/N of the gradients, N = 2
        assert narrow_bytes == wide_bytes / 2
        assert rounded != exact
        assert rounded == pytest.approx(exact, rel=2e-2)


class SkipsALayer(Features):
    """Has a branch that the loss does not use, and a frozen layer, which DDP ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.branch = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.last(self.first(batch)).square().mean()


def fit_with_unused_parameters(**options: object) -> str:
    trainer = quiet_trainer(strategy=ParalDDPStrategy(**options), devices=2, max_epochs=1)
    try:
        trainer.fit(SkipsALayer(), rows())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def fit_finding_unused_parameters() -> str:
    return fit_with_unused_parameters(find_unused_parameters=True)


def test_unused_parameters_are_named_on_each_rank_with_the_option_to_set(on_ranks) -> None:
    for rank, message in enumerate(on_ranks(2, fit_with_unused_parameters)):
        assert message.startswith(f"UnusedParametersError: On rank {rank} ")
        assert "branch.0.weight, branch.0.bias. " in message
        assert "first" not in message
        assert "find_unused_parameters=True" in message
    assert on_ranks(2, fit_finding_unused_parameters) == ["trained"] * 2


def fit_with_own_hook() -> int:
    calls = []

    def average(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(bucket.index())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    fit_regression(5, 1, 2, strategy=ParalDDPStrategy(ddp_comm_hook=average))
    return len(calls)


def test_users_communication_hook_is_used_on_cpu(on_ranks) -> None:
    assert min(on_ranks(2, fit_with_own_hook)) >= 5


def fit_in_a_group_of_another_size() -> str:
    trainer = quiet_trainer(strategy="paral_ddp", devices=4, max_steps=1, plugins=[LightningEnvironment()])
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(Regression(), regression_data(1, 4))
    return str(caught.value)


def test_group_of_another_size_is_refused(on_ranks) -> None:
    for rank, message in enumerate(on_ranks(2, fit_in_a_group_of_another_size)):
        assert f"rank {rank} of 2" in message
        assert f"rank {rank} of 4" in message


class DerivesInTest(Features):
    """Takes the derivative by its inputs in a test step, as adversarial evaluation does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        with torch.enable_grad():
            inputs = batch.clone().requires_grad_()
            self.manual_backward(self.last(self.first(inputs)).sum())
        self.log("gradient", inputs.grad.norm())


def derive_in_test(strategy: str, devices: int) -> float:
    torch.manual_seed(0)
    trainer = quiet_trainer(strategy=strategy, devices=devices, inference_mode=False)
    return trainer.test(DerivesInTest(), rows(), verbose=False)[0]["gradient"]


def test_manual_backward_outside_a_fit_takes_a_derivative(on_ranks) -> None:
    assert on_ranks(2, derive_in_test, "paral_ddp", 2) == [pytest.approx(derive_in_test("auto", 1))] * 2


class BackwardTwice(Features):
    """Runs a second backward pass in `backward`, which the strategy calls once."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self.first.weight.square().sum().backward()


def fit_with_second_backward() -> str:
    with pytest.raises(ConfigurationError) as error:
        quiet_trainer(strategy="paral_ddp", devices=2, max_epochs=1).fit(BackwardTwice(), rows())
    return str(error.value)


def test_second_backward_pass_of_an_overridden_backward_is_refused(on_ranks) -> None:
    for message in on_ranks(2, fit_with_second_backward):
        assert "the ranks did not average them" in message


def fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the reason")
    dist.barrier()


def test_failure_of_one_rank_fails_the_call_with_its_traceback_and_the_pool_recovers(on_ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: Traceback.*ValueError: the reason"):
        on_ranks(2, fail_on_rank_one)

    assert on_ranks(2, dist.get_rank) == [0, 1]
