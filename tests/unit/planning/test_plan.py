"""`lightning_paral.plan`: rows, recommendations, notes, and errors."""

import itertools
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn

import lightning_paral
from lightning_paral import (
    STRATEGIES,
    ActivationCheckpointing,
    ConfigurationError,
    ParalAutoStrategy,
    ParalDDPStrategy,
    ParalFSDPStrategy,
    ParalZeROStrategy,
    Plan,
    plan,
)
from lightning_paral.cli.plan import plan_command
from lightning_paral.planning.costs import Case, Estimate, estimate
from lightning_paral.planning.fake import FakeModule, StepSettings
from lightning_paral.planning.follow import IsolatedError, batch_of_shape, run_isolated
from lightning_paral.planning.layout import LAYOUTS, Layout, layouts_of
from lightning_paral.planning.plan import advise, is_candidate
from lightning_paral.planning.trace import (
    ROOT,
    ModelStates,
    ParameterState,
    PlannedUnit,
    Point,
    Step,
    count_states,
    follow_step,
)
from tests.models.planned import Adversarial, ConvNet, DependsOnValues, bytes_of_text, gpt, images

PROJECT = Path(lightning_paral.__file__).parents[1]


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(gpt(256, 6), bytes_of_text(16), world_size=4, device_memory="16GiB")


def test_rows_cover_every_strategy_with_and_without_recomputation(planned: Plan) -> None:
    names = [each.layout.name for each in planned.estimates]

    recomputed = [f"{layout.name} + recompute" for layout in LAYOUTS]
    assert [name for name in names if "recompute" not in name] == [layout.name for layout in LAYOUTS]
    assert [name for name in names if "recompute" in name] == recomputed
    assert {layout.strategy for layout in LAYOUTS} == {entry.name for entry in STRATEGIES} - {"paral_auto", "paral_dp"}


def test_sharding_and_recomputation_save_memory(planned: Plan) -> None:
    def peak(name: str) -> int:
        return planned.of(name).peak_bytes

    assert peak("paral_fsdp") < peak("paral_zero2") < peak("paral_ddp")
    assert peak("paral_fsdp + recompute") < 0.5 * peak("paral_fsdp")
    assert peak("paral_fsdp_offload") < peak("paral_fsdp")
    assert planned.of("paral_fsdp_offload").host_bytes > 0
    assert planned.of("paral_zero3_nvme").nvme_bytes > 0
    size = planned.states.parameter_bytes  # of an fp32 copy of the parameters, which Adam has twice
    assert planned.of("paral_zero2_offload").host_bytes == pytest.approx(4 * size / 4, rel=0.01)


@pytest.mark.parametrize(
    ("on_cpu", "sequence"),
    [
        (True, "ddp, zero1, fsdp, zero3_nvme, zero3_nvme+, nothing"),
        (False, "ddp, fsdp, fsdp+, fsdp_offload, fsdp_offload+, nothing"),
    ],
    ids=["cpu", "cuda"],
)
def test_choice_becomes_more_expensive_as_memory_shrinks(on_cpu: bool, sequence: str) -> None:
    device = "cpu" if on_cpu else "cuda"
    module = gpt(512, 6) if on_cpu else gpt(256, 6)
    rows = plan(module, bytes_of_text(2), 2 if on_cpu else 4, device_type=device).estimates  # type: ignore[arg-type]
    rated = [each for each in rows if is_candidate(each.layout, on_cpu)]

    choices = [advise(rated, mebibytes * 2**20)[0] for mebibytes in range(600, 1, -1)]
    names = ["nothing" if each is None else each.layout.name[6:].replace(" + recompute", "+") for each in choices]
    assert ", ".join(name for name, _ in itertools.groupby(names)) == sequence


def test_nothing_fits_is_said_with_what_would_help() -> None:
    made = plan(gpt(256, 6), bytes_of_text(64), 4, "30MiB")

    assert made.chosen is None
    assert "Nothing fits into 27.0 MiB" in made.advice
    assert made.advice.endswith("or devices with more memory.")


def test_plan_is_json_and_text(planned: Plan) -> None:
    values = json.loads(json.dumps(planned.as_dict()))

    assert values["recommended"] == "paral_ddp"
    assert [row["name"] for row in values["strategies"]] == [each.layout.name for each in planned.estimates]
    text = str(planned)
    assert 'Use strategy="paral_ddp"' in text
    assert all(layout.strategy in text for layout in LAYOUTS)


@pytest.mark.parametrize("batch", [images(), {"a": torch.zeros(3)}], ids=["values", "wrong_batch"])
def test_step_that_cannot_be_followed_is_planned_from_states_alone(batch: Any) -> None:
    made = plan(DependsOnValues(), batch, 2, "1GiB")

    assert re.search(
        r"The step cannot be followed \(.*raised in `training_step`.*activations are not counted", str(made.notes)
    )
    assert made.chosen is not None
    assert made.of("paral_ddp").peak_bytes >= 5 * made.states.parameter_bytes


def test_states_of_several_optimizers_are_counted() -> None:
    def follow() -> ModelStates:
        fake = FakeModule(Adversarial(), StepSettings())
        follow_step(fake, torch.zeros(4, 8))
        return count_states(fake)

    states = run_isolated(follow)

    sizes = [(state.num_bytes, state.optimizer_bytes) for state in states.parameters]
    step = 4  # bytes of Adam's `step`
    assert sizes == [(256, 256), (32, 32), (32, 64 + step), (4, 8 + step)]  # SGD with momentum, then Adam
    assert states.num_optimizers == 2


@pytest.mark.parametrize(
    ("stage", "num_ranks", "gigabytes"), [(1, 1, 120.0), (1, 64, 31.4), (2, 64, 16.6), (3, 64, 1.9)]
)
def test_states_are_those_of_figure_1_of_the_zero_paper(stage: int, num_ranks: int, gigabytes: float) -> None:
    parameter = ParameterState(shape=(3_750, 1000), dtype=torch.bfloat16, is_trained=True, optimizer_bytes=15_000_000)
    units = (PlannedUnit(name="", parameters=tuple(range(2000))),)
    states = ModelStates((parameter,) * 2000)
    step = Step(points=(Point(ROOT, True, 0, 0, states.gradient_bytes),), units=units)
    (layout,) = layouts_of([f"paral_zero{stage}"])
    settings = StepSettings(precision="bf16-true")

    row = estimate(Case(layout=layout, step=step, states=states, num_ranks=num_ranks, settings=settings, on_cpu=True))
    memory = row.moments[0]  # when the backward pass ends

    assert (memory.parameters + memory.gradients + memory.optimizer) / 1e9 == pytest.approx(gigabytes, abs=0.07)


class Ordinary(LightningModule):
    """What steps of users do besides computing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Any]:
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        self.logger.experiment.add_scalar("step", self.global_step, self.current_epoch)
        self.logger.log_metrics({"rate": schedule.get_last_lr()[0]})
        loss = self.net(batch + torch.randn_like(batch, device=self.device)).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        schedule.step()
        self.log_dict({"loss": loss, "rate": optimizer.param_groups[0]["lr"]}, prog_bar=True)
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(steps))]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_loggers_schedules_and_clipping_do_not_hinder_a_plan(device: str) -> None:
    with torch.device(device):
        module = Ordinary()
    made = plan(module, torch.zeros(4, 8), 2, "1GiB")

    assert "cannot be followed" not in str(made)
    assert made.of("paral_ddp").peak_bytes > 5 * made.states.parameter_bytes


def test_a_step_is_followed_although_a_fork_cannot_use_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: initialization error")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", fail)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", fail)

    assert plan(gpt(), bytes_of_text(), 2, "1GiB").notes == ()


def test_lazy_layers_are_named() -> None:
    module = BoringModel()
    module.layer = nn.LazyLinear(2)  # type: ignore[assignment]

    with pytest.raises(ConfigurationError, match=r"The shape of layer\.weight is not known"):
        plan(module, torch.zeros(4, 32), 2)


def test_the_module_is_not_changed() -> None:
    module = gpt()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in module.state_dict(keep_vars=True).items()}

    plan(module, bytes_of_text(), 2, "1GiB")

    after = module.state_dict(keep_vars=True)
    assert all(id(after[name]) == identity for name, (identity, _) in before.items())
    assert all(torch.equal(after[name], value) for name, (_, value) in before.items())
    assert vars(module).get("log") is None
    assert all(parameter.grad is None for parameter in module.parameters())


def test_70_billion_parameters_are_planned_without_allocating_them() -> None:
    program = (
        "import resource\n"
        "from lightning_paral import plan\n"
        "from tests.models.planned import bytes_of_text, gpt\n"
        "made = plan(lambda: gpt(8192, 86), bytes_of_text(1), 64, '80GiB', precision='bf16-true')\n"
        "peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))\n"
        "print(made.states.num_params, peak * 1024, made.chosen.layout.name)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, timeout=600)

    assert run.returncode == 0, run.stderr
    numel, peak, name = run.stdout.split(maxsplit=2)
    assert int(numel) > 69e9
    assert int(peak) < 2 * 2**30
    assert name.startswith(("paral_fsdp", "paral_zero3"))


def test_shapes_of_a_batch_are_read() -> None:
    ids, images = batch_of_shape("8x128:int64, 8x3x32x32")

    assert (ids.shape, ids.dtype) == ((8, 128), torch.int64)
    assert (images.shape, images.dtype) == ((8, 3, 32, 32), torch.float32)
    assert batch_of_shape("4").shape == (4,)


class Broken(BoringModel):
    def configure_optimizers(self) -> Any:
        raise KeyError("lr")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": Broken()}, "The module cannot be planned: KeyError: 'lr', raised in `configure_optimizers`"),
        ({"strategies": [ParalFSDPStrategy(replicate=3)], "world_size": 4}, "replicate=3 does not divide the 4 ranks"),
        ({"strategies": [ParalAutoStrategy()]}, "ParalAutoStrategy cannot be planned"),
        ({"world_size": 0}, "world_size=0 has to be at least 1"),
        *(
            ({"device_memory": size}, f"device_memory {size!r} is not a size")
            for size in ("many", 0, "1.2.3MB", "-1GB")
        ),
        ({"strategies": ["paral_fsdpp"]}, "Did you mean 'paral_fsdp'"),
        ({"strategies": []}, "No strategies were given"),
        ({"accumulate": 0}, "accumulate=0 has to be at least 1"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        plan(**({"module": ConvNet(), "batch": images(), "world_size": 2} | arguments))


def test_a_crash_of_the_fork_is_an_error_here() -> None:
    import os

    with pytest.raises(IsolatedError, match="its process crashed"):
        run_isolated(lambda: os._exit(3))
    with pytest.raises(IsolatedError, match="did not end within 1 seconds"):
        run_isolated(lambda: time.sleep(60), timeout=1)
    with pytest.raises(IsolatedError, match="ZeroDivisionError"):
        run_isolated(lambda: 1 / 0)


def row_of(strategy: Any, **options: Any) -> Estimate:
    return plan(gpt(), bytes_of_text(4), 4, strategies=[strategy], **options).estimates[0]


def test_objects_of_registered_strategies_have_their_layouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARAL_NVME_PATH", str(tmp_path))
    monkeypatch.setenv("PARAL_PERIOD", "1")
    made = [entry.strategy(**entry.arguments) for entry in STRATEGIES]

    assert [getattr(each, "layout", None) for each in made] == [None, None, *LAYOUTS]


def test_options_of_objects_count() -> None:
    fsdp, two_replicas = row_of("paral_fsdp"), row_of(ParalFSDPStrategy(replicate=2))
    kept = row_of(ParalFSDPStrategy(reshard_after_forward=False))
    assert two_replicas.wire_bytes < fsdp.wire_bytes
    assert kept.peak_bytes > fsdp.peak_bytes
    assert kept.wire_bytes == pytest.approx(fsdp.wire_bytes * 2 / 3, rel=0.01)

    on_host = row_of(ParalZeROStrategy(stage=3, offload_optimizer="cpu"), device_type="cuda")
    assert on_host.host_bytes > 0
    assert on_host.layout.parameter_place == "device"
    recomputed = ParalDDPStrategy(activation_checkpointing=ActivationCheckpointing())
    assert row_of(recomputed).peak_bytes < row_of("paral_ddp").peak_bytes


def test_rows_of_objects_are_labelled_and_not_recommended_by_a_name_that_lacks_options() -> None:
    made = plan(gpt(), bytes_of_text(4), 4, "1GiB", strategies=[ParalFSDPStrategy(), ParalFSDPStrategy(replicate=4)])

    assert [each.layout.name for each in made.estimates] == ["configured", "configured 2"]
    assert "Use the configured" in made.advice
    assert "The row configured 2 is paral_fsdp with the options that change the figures." in made.notes
    assert [row["replicas"] for row in made.as_dict()["strategies"]] == [1, 4]


ZERO3 = {"class_path": "lightning_paral.ParalZeROStrategy", "init_args": {"stage": 3, "offload_optimizer": "cpu"}}


@pytest.mark.parametrize(
    ("strategy", "first", "said"),
    [
        (ZERO3, ("configured", "paral_zero3_offload"), ""),
        ("paral_zero2", ("configured", "paral_zero2"), ""),
        ("ddp", ("paral_ddp", "paral_ddp"), "the configured strategy, ddp, has no row"),
        ({"class_path": "lightning_paral.ParalAutoStrategy"}, ("paral_ddp", "paral_ddp"), ""),
        (None, ("paral_ddp", "paral_ddp"), ""),
    ],
    ids=["object", "name", "of_lightning", "auto", "none"],
)
def test_command_plans_the_configured_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: Any, first: tuple[str, str], said: str
) -> None:
    config = {
        "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
        "data": {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"},
        "trainer": {"devices": 4, **({} if strategy is None else {"strategy": strategy})},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    plan_command(["--config", str(tmp_path / "config.yaml"), "--strategies", "paral_ddp,paral_fsdp", "--json"])

    printed = capsys.readouterr()
    rows = json.loads(printed.out)["strategies"]
    assert (rows[0]["name"], rows[0]["strategy"]) == first
    assert [row["name"] for row in rows][-2:] == ["paral_ddp", "paral_fsdp"]
    assert said in printed.err
    assert bool(said) == ("has no row" in printed.err)


def test_one_stage_needs_no_unit_for_each_virtual_stage() -> None:
    layout = Layout(strategy="paral_pp", engine="pipeline", stages=1, parts_per_stage=2)

    assert layout.objection(2, num_units=1) is None
    assert "4 parts of stages" in str(replace(layout, stages=2).objection(2, num_units=3))
