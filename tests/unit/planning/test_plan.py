"""`lightning_paral.plan`: rows, recommendations, notes, and errors."""

import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor, nn

import lightning_paral
from lightning_paral import ConfigurationError, Plan, plan
from lightning_paral.planning.advice import advise, candidates
from lightning_paral.planning.batch import batch_of_shape
from lightning_paral.planning.following import follow_steps
from lightning_paral.planning.isolated import IsolatedError, run_isolated
from lightning_paral.planning.layout import LAYOUTS
from lightning_paral.planning.plan import make_plan
from lightning_paral.planning.settings import StepSettings
from tests.unit.planning.models import ConvNet, DependsOnValues, bytes_of_text, gpt, images

ROOT = Path(lightning_paral.__file__).parents[1]


@pytest.fixture(scope="module")
def planned() -> Plan:
    return plan(gpt(256, 6), bytes_of_text(16), world_size=4, device_memory="16GiB", max_batch=True)


def test_rows_cover_every_strategy_with_and_without_recomputation(planned: Plan) -> None:
    names = [each.layout.name for each in planned.estimates]

    recomputed = [f"{layout.name} + recompute" for layout in LAYOUTS if layout.engine != "dp"]
    assert [name for name in names if "recompute" not in name] == [layout.name for layout in LAYOUTS]
    assert [name for name in names if "recompute" in name] == recomputed  # paral_dp has no such option
    for each in planned.estimates:
        assert each.memory.peak_bytes == sum(each.memory.by_item.values()) > 0


def test_sharding_and_recomputation_save_memory(planned: Plan) -> None:
    def peak(name: str) -> int:
        return planned.of(name).memory.peak_bytes

    assert peak("paral_fsdp") < peak("paral_zero2") < peak("paral_ddp")
    assert peak("paral_fsdp + recompute") < 0.5 * peak("paral_fsdp")
    assert peak("paral_fsdp_offload") < peak("paral_fsdp")
    assert planned.of("paral_fsdp_offload").memory.host_bytes > 0
    assert planned.of("paral_zero3_nvme").memory.nvme_bytes > 0


@pytest.mark.parametrize(
    ("on_cpu", "sequence"),
    [
        (True, "paral_ddp, paral_zero1, paral_fsdp, paral_fsdp+, paral_zero3_nvme, paral_zero3_nvme+, nothing"),
        (False, "paral_ddp, paral_fsdp, paral_fsdp+, paral_fsdp_offload, paral_fsdp_offload+, nothing"),
    ],
    ids=["cpu", "cuda"],
)
def test_choice_becomes_more_expensive_as_memory_shrinks(on_cpu: bool, sequence: str) -> None:
    settings = StepSettings()
    followed = follow_steps(gpt(512, 6) if on_cpu else gpt(256, 6), bytes_of_text(1), settings)

    made = make_plan(
        followed,
        name="GPT",
        layouts=LAYOUTS,
        world_size=2 if on_cpu else 4,
        device_memory=None,
        settings=settings,
        on_cpu=on_cpu,
    )
    considered = candidates(on_cpu=on_cpu)
    rows = [each for each in made.estimates if each.layout in considered]

    choices = [advise(rows, mebibytes * 2**20).chosen for mebibytes in range(600, 1, -1)]
    names = ["nothing" if each is None else each.layout.name.replace(" + recompute", "+") for each in choices]
    assert ", ".join(name for name, _ in itertools.groupby(names)) == sequence


def test_batches_that_fit_are_larger_where_less_memory_is_used(planned: Plan) -> None:
    largest = planned.max_batches

    assert 16 < largest["paral_ddp"] < largest["paral_ddp + recompute"]
    again = plan(gpt(256, 6), bytes_of_text(largest["paral_ddp"]), 4, "16GiB", strategies=["paral_ddp"])
    one_more = plan(gpt(256, 6), bytes_of_text(largest["paral_ddp"] + 8), 4, "16GiB", strategies=["paral_ddp"])
    limit = 0.9 * 16 * 2**30
    assert again.of("paral_ddp").memory.peak_bytes <= limit < one_more.of("paral_ddp").memory.peak_bytes


def test_nothing_fits_is_said_with_what_would_help() -> None:
    made = plan(gpt(256, 6), bytes_of_text(64), 4, "80MiB", max_batch=True)

    assert made.chosen is None
    assert "Nothing fits into 72.0 MiB" in made.advice.text
    assert "per rank and batch" in made.advice.text


def test_plan_is_json_and_text(planned: Plan) -> None:
    values = json.loads(json.dumps(planned.as_dict()))

    assert values["recommended"] == "paral_ddp"
    assert [row["name"] for row in values["strategies"]] == [each.layout.name for each in planned.estimates]
    text = str(planned)
    assert 'Use strategy="paral_ddp"' in text
    assert all(layout.strategy in text for layout in LAYOUTS)


def test_step_that_depends_on_values_is_planned_from_states_alone() -> None:
    made = plan(DependsOnValues(), images(), 2, "1GiB")

    assert "activations are not counted" in made.notes[0]
    assert made.chosen is not None
    assert made.of("paral_ddp").memory.peak_bytes >= 5 * made.states.parameter_bytes


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

    assert made.notes == ()
    assert made.of("paral_ddp").memory.peak_bytes > 5 * made.states.parameter_bytes


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
        "from tests.unit.planning.models import bytes_of_text, gpt\n"
        "made = plan(lambda: gpt(8192, 86), bytes_of_text(1), 64, '80GiB', precision='bf16-true')\n"
        "peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))\n"
        "print(made.states.num_params, peak * 1024, made.chosen.layout.name)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=600)

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch": {"a": torch.zeros(3)}}, "ConvNet.training_step does not take the batch, {'a': float32 [3]}"),
        ({"world_size": 0}, "world_size=0 has to be at least 1"),
        ({"device_memory": "many"}, "device_memory 'many' is not a size"),
        ({"device_memory": 0}, "device_memory 0 is not a size"),
        ({"strategies": ["paral_fsdpp"]}, "Did you mean 'paral_fsdp'"),
        ({"strategies": []}, "No strategies were given"),
        ({"accumulate": 0}, "accumulate=0 has to be at least 1"),
    ],
)
def test_bad_input_is_one_clear_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        plan(ConvNet(), **({"batch": images(), "world_size": 2} | arguments))


def test_configure_optimizers_that_fails_is_named() -> None:
    class Broken(BoringModel):
        def configure_optimizers(self) -> Any:
            raise KeyError("lr")

    with pytest.raises(ConfigurationError, match=r"Broken.configure_optimizers\(\) failed .* KeyError: 'lr'"):
        plan(Broken(), torch.zeros(2, 32), 2)


def test_a_crash_of_the_fork_is_an_error_here() -> None:
    import os

    with pytest.raises(IsolatedError, match="its process crashed"):
        run_isolated(lambda: os._exit(3))
    with pytest.raises(IsolatedError, match="did not end within 1 seconds"):
        run_isolated(lambda: time.sleep(60), timeout=1)
    with pytest.raises(IsolatedError, match="ZeroDivisionError"):
        run_isolated(lambda: 1 / 0)


def test_offload_leaves_neither_gradients_nor_optimizer_on_the_device() -> None:
    planned = plan(gpt(256, 6), bytes_of_text(16), world_size=1, device_memory="16GiB", precision="bf16-true")
    size = planned.states.parameter_bytes

    kept, offloaded = (planned.of(name).memory for name in ("paral_zero2", "paral_zero2_offload"))

    assert offloaded.peak_bytes < kept.peak_bytes - 3 * size  # gradients, and Adam's states and masters in fp32
    assert offloaded.host_bytes == pytest.approx(8 * size, rel=0.01)  # 16 bytes for each parameter
