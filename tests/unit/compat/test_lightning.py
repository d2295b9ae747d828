"""Canaries: Lightning still calls the methods that `compat.lightning` replaces, and behaves as it expects."""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint, WeightAveraging
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.nn import Linear, Module, Sequential
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_paral import ConfigurationError, ParalDDPStrategy
from lightning_paral.compat.lightning import averaging, evaluation, loops, metrics, strategies
from lightning_paral.compat.lightning.accumulation import replace_check
from lightning_paral.compat.lightning.device_property import set_device, set_device_everywhere
from lightning_paral.compat.lightning.methods import replace_methods, shadow_method
from lightning_paral.compat.lightning.precision import after_closure
from lightning_paral.compat.lightning.results import ResultCollection
from lightning_paral.compat.lightning.samplers import injects_sampler, replace_preparation
from lightning_paral.compat.lightning.training_steps import actions_of_step, follow_profiler, step_of_loggers
from lightning_paral.compat.private_name import PrivateName
from lightning_paral.distributed.launching.launcher import CheckedSubprocessLauncher
from lightning_paral.errors import PrivateNameError
from lightning_paral.model.trainer_of import trainer_of
from tests.running import quiet_trainer


class Model(LightningModule):
    """Calls `on_step` in each training, validation, test and prediction step."""

    def __init__(self, on_step: Callable[["Model"], None] = lambda _: None) -> None:
        super().__init__()
        self.layer = Linear(2, 1)
        self.on_step = on_step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.on_step(self)
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.on_step(self)
        self.log("logged", batch[0].mean())

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> int:
        self.on_step(self)
        return batch_idx

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(num_batches: int = 2) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(num_batches, 2)), batch_size=1)


def trainer(**options: Any) -> Trainer:
    return quiet_trainer(
        **{"max_epochs": 1, "num_sanity_val_steps": 0, "strategy": SingleDeviceStrategy("cpu")} | options
    )


def test_new_trainer_sets_ranks_and_requests_the_launcher_at_its_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Told(ParalDDPStrategy):
        nodes: int | None = None

        def set_world_ranks(self) -> None:
            super().set_world_ranks()
            self.nodes = self.num_nodes

    class LaunchedError(Exception):
        pass

    def launch(self: CheckedSubprocessLauncher, *args: Any, **kwargs: Any) -> None:
        raise LaunchedError

    strategy = Told(start_method="popen")
    built = quiet_trainer(strategy=strategy, devices=2, num_nodes=3)
    monkeypatch.setattr(CheckedSubprocessLauncher, "launch", launch)

    assert strategy.nodes == 3, "Trainer no longer calls set_world_ranks last: nothing is checked before the launch"
    with pytest.raises(LaunchedError):
        built.fit(Model(), loader())


def test_new_trainer_sets_ranks_of_dp() -> None:
    with pytest.raises(ConfigurationError, match="num_nodes=2"):
        quiet_trainer(strategy="paral_dp", devices=1, num_nodes=2)


def test_evaluation_runs_each_step_and_each_end_of_a_loader_through_replaced_methods() -> None:
    plain, calls, counted = trainer(), [], []
    loop, results = plain.validate_loop, ResultCollection(training=False)
    seen: list[Model] = []

    def noted(step: evaluation.Step) -> evaluation.Step:
        def noted_step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
            calls.append((batch_idx, dataloader_idx, dataloader_iter))
            assert evaluation.combined_loader_of(loop).flattened
            if batch_idx == 0:
                step(batch, batch_idx, dataloader_idx, dataloader_iter)
            else:
                before = loop.batch_progress.current.completed
                evaluation.call_step_without_hooks(plain, loop, "validation_step", batch, batch_idx, dataloader_idx)
                counted.append(loop.batch_progress.current.completed - before)

        return noted_step

    with ExitStack() as undo:
        evaluation.replace_evaluation_step(loop, noted, undo)
        evaluation.call_at_end_of_loader(loop, plain, lambda: calls.append("end"), undo)
        evaluation.set_results(loop, results)
        plain.validate(Model(seen.append), [loader(2), loader(1)], verbose=False)
    assert calls == [(0, 0, None), (1, 0, None), "end", (0, 1, None), "end"], "Lightning evaluates by other methods"
    assert len(seen) == 3
    assert counted == [0], "a step alone counts as a batch"
    assert evaluation.results_of(loop) is results
    assert "_evaluation_step" not in vars(loop)


def test_logged_values_pass_through_overridden_methods() -> None:
    called: set[str] = set()

    class Noted(ResultCollection):
        def log(self, *args: Any, **options: Any) -> None:
            called.add("log")
            super().log(*args, **options)

        def update_metrics(self, *args: Any) -> None:
            called.add("update_metrics")
            super().update_metrics(*args)

        def metrics(self, on_step: bool) -> Any:
            called.add("metrics")
            return super().metrics(on_step)

    plain = trainer()
    evaluation.set_results(plain.validate_loop, Noted(training=False))
    plain.validate(Model(), loader(), verbose=False)

    assert called == {"log", "update_metrics", "metrics"}, "self.log calls other methods of the collection"


def test_prediction_runs_each_step_through_a_replaced_method() -> None:
    plain, batches = trainer(), []

    def noted(step: evaluation.Step) -> evaluation.Step:
        def noted_step(batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
            batches.append(batch_idx)
            step(batch, batch_idx, dataloader_idx, dataloader_iter)

        return noted_step

    with ExitStack() as undo:
        evaluation.replace_predict_step(plain.predict_loop, noted, undo)
        predictions = plain.predict(Model(), loader(2))
    assert batches == predictions == [0, 1], "Lightning predicts by another method"


def test_loaders_are_prepared_by_a_replaced_method() -> None:
    plain, prepared = trainer(use_distributed_sampler=False), []

    def prepare(data: object, shuffle: bool, mode: Any) -> object:
        prepared.append((shuffle, str(mode.value)))
        return by_lightning(data, shuffle, mode)

    with ExitStack() as undo:
        by_lightning = replace_preparation(plain, prepare, undo)
        plain.fit(Model(), loader(), loader())
    assert prepared == [(True, "train"), (False, "validate")], "Lightning prepares loaders by another method"
    assert injects_sampler(plain) is False


def test_fit_loops_have_the_attributes_that_are_read() -> None:
    accumulating: list[bool] = []
    inference_modes: list[bool] = []
    data_began: list[bool] = []

    class Looked(Model):
        def on_train_start(self) -> None:
            data_began.append(loops.training_data_has_started(self.trainer))
            loops.restart_training_data(self.trainer)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            accumulating.append(loops.is_accumulating(self.trainer))
            return super().training_step(batch, batch_idx)

    plain = trainer(accumulate_grad_batches=2)
    loops.evaluate_without_inference_mode(plain)
    loops.call_once_after_setup_of_data(plain, lambda: data_began.append(plain.train_dataloader is not None))
    model = Looked()
    plain.fit(model, loader(4))
    model.on_step = lambda _: inference_modes.append(torch.is_inference_mode_enabled())
    plain.validate(model, loader(1), verbose=False)
    plain.predict(model, loader(1))

    assert accumulating == [True, False] * 2
    assert data_began == [True, True], "the loaders of a fit are not there when training starts"
    assert inference_modes == [False, False], "evaluation runs in inference mode again"
    assert "setup_data" not in vars(plain.fit_loop)


def test_weight_averaging_swaps_and_copies_by_replaced_methods() -> None:
    calls: list[str] = []
    swap, copy = averaging.swap_method(), averaging.copy_method()

    def noted(name: str, method: Any) -> Callable[[Any, LightningModule], None]:
        def call(callback: Any, pl_module: LightningModule) -> None:
            assert averaging.averages_of(callback) is not None
            calls.append(name)
            method(callback, pl_module)

        return call

    callback = WeightAveraging(avg_fn=lambda average, value, count: value)
    assert averaging.user_options_of(callback).keys() == {"avg_fn"}
    assert averaging.options_of(callback).keys() == {"device", "use_buffers", "avg_fn"}
    undo = replace_methods(WeightAveraging, {averaging.SWAP: noted("swap", swap), averaging.COPY: noted("copy", copy)})
    try:
        trainer(callbacks=[callback]).fit(Model(), loader(1), loader(1))
    finally:
        undo()
    assert calls == ["swap", "swap", "copy"], "WeightAveraging exchanges averages and weights by other methods"
    assert averaging.swap_method() is swap


def test_steps_run_through_a_redirection_if_the_model_is_wrapped() -> None:
    strategy = SingleDeviceStrategy("cpu")
    redirected: list[str] = []

    def redirect(wrapper: Module, original: LightningModule, name: str, *args: Any) -> None:
        redirected.append(name)

    module = Model()
    strategy.connect(module)
    strategy.model = Sequential(module)
    strategies.set_forward_redirection(strategy, redirect)
    strategy.training_step([torch.ones(1, 2)], 0)

    assert redirected == ["training_step"]


def test_the_check_of_accumulation_schedules_can_be_replaced() -> None:
    callback = GradientAccumulationScheduler({0: 2})
    checked: list[tuple[Any, ...]] = []
    replace_check(callback, lambda *args: checked.append(args))
    plain, model = trainer(callbacks=[callback]), Model()
    plain.fit(model, loader())

    assert checked == [(callback, plain, model)]


def test_precision_plugin_runs_hook_and_clipping_between_closure_and_step() -> None:
    clipped: list[float | None] = []

    class Clipped(Model):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            clipped.append(None)

        def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any = None, **options: Any) -> None:
            clipped.append(gradient_clip_val)

        def on_train_start(self) -> None:
            after_closure(self.trainer.precision_plugin, self, self.optimizers())

    trainer(gradient_clip_val=0.5, limit_train_batches=1).fit(Clipped(), loader())

    assert clipped == [None, 0.5] * 2


def test_metrics_gather_with_the_replaced_function() -> None:
    metric, called = MeanMetric(), []

    undo = metrics.replace_gathering(lambda *args, process_group: called.append((*args, process_group)))
    metric.sync(process_group="group", distributed_available=lambda: True)
    undo()

    assert called == [(metric, metric._sync_dist, gather_all_tensors, "group")]


def test_caches_of_metrics_can_be_set() -> None:
    metric = MeanMetric()
    metrics.mark_updated(metric)
    metrics.set_computed(metric, torch.tensor(7.0))
    assert metric.compute() == 7

    metric.reset()
    assert metric(3.0) == metrics.value_of_step(metric) == 3
    metrics.set_value_of_step(metric, torch.tensor(4.0))
    assert metrics.value_of_step(metric) == 4
    assert metric.metric_state == {"mean_value": torch.tensor(3.0), "weight": torch.tensor(1.0)}


def test_device_of_a_module_alone_and_of_all_in_it() -> None:
    module = Model()
    module.inner = Model()
    set_device(module, torch.device("meta"))
    assert module.device.type == "meta"
    assert module.inner.device.type == module.layer.weight.device.type == "cpu"

    set_device_everywhere(module, torch.device("meta"))
    assert module.inner.device.type == "meta"
    assert module.layer.weight.device.type == "cpu"


def test_module_without_a_trainer_returns_none() -> None:
    assert trainer_of(None) is None
    assert trainer_of(Model()) is None


@pytest.mark.parametrize(
    "replace",
    [
        lambda: shadow_method(Model(), "_gone", print),
        lambda: replace_methods(WeightAveraging, {"_gone": print}),
        lambda: PrivateName(
            name="torch.nn.Module._gone", on_instances=True, purpose="to show this", reason="none", seen="none"
        ).replace_on(Model(), None),
    ],
    ids=["method of an instance", "method of a class", "attribute"],
)
def test_replacing_a_missing_attribute_raises(replace: Callable[[], Any]) -> None:
    with pytest.raises(PrivateNameError, match=r"_gone.*[Ii]nstall"):
        replace()


def test_resuming_inside_an_epoch_does_not_warn_or_change_warning_filters(tmp_path: Path) -> None:
    checkpoints = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    first = trainer(strategy="paral_ddp", devices=1, callbacks=[checkpoints], enable_checkpointing=True)
    first.fit(Model(), loader(3))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        resumed = trainer(strategy="paral_ddp", devices=1)
        resumed.fit(Model(), loader(3), ckpt_path=tmp_path / "step=2.ckpt")
        assert warnings.filters == before
    assert resumed.global_step == 3
    assert not [each for each in warned if "resuming from a checkpoint" in str(each.message)]


def test_loop_profiles_the_actions_of_a_step() -> None:
    begun: list[str] = []
    ended: list[str] = []
    undo = ExitStack()

    class Followed(Model):
        def on_train_start(self) -> None:
            names = actions_of_step(self.trainer, data="data", forward="forward", backward="backward", optimizer="step")
            labels = {name: f"{label} {name}" for name, label in names.items()}
            follow_profiler(self.trainer, labels, begun.append, ended.append, undo)

    class Manual(Followed):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
            optimizer: Any = self.optimizers()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    for module, kinds in (
        (Followed(), ["data", "data", "step", "forward", "backward"]),
        (Manual(), ["data", "data", "forward", "step"]),
    ):
        with undo:
            trainer().fit(module, loader(2))

        assert [name.split()[0] for name in begun] == kinds * 2
        assert sorted(begun) == sorted(ended)
        begun.clear()
        ended.clear()


def test_loop_counts_the_steps_of_loggers() -> None:
    steps: list[int] = []
    trainer(accumulate_grad_batches=2).fit(Model(lambda model: steps.append(step_of_loggers(model.trainer))), loader(5))

    assert steps == [0, 0, 1, 1, 2]
