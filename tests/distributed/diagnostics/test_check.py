"""`check` finds what differs from one process, names it and its place, and finds nothing in a sound project."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_paral import STRATEGIES, ConfigurationError, DifferenceError, ReferenceFailedError, check
from lightning_paral.cli.check import check_command
from lightning_paral.diagnostics.check import DEFAULT, CheckReport, CheckRow, by_name
from tests.launching import outputs
from tests.models import planted
from tests.models.planted import Sound, WritesOnOneRank, data

DDP = ("paral_ddp",)
LOCAL = ("paral_local_sgd", "paral_diloco")


def row_of(pool: Any, make: Callable[[], Any], make_data: Any = data, **options: Any) -> CheckRow:
    return check(make, make_data, pool=pool, **{"strategies": DDP} | options).rows[0]


def test_sound_project_is_equal_or_refused_under_every_strategy(rank_pool) -> None:
    names = [entry.name for entry in STRATEGIES if entry.name not in DEFAULT]  # tests of the README check the default
    strategies = by_name(names)
    strategies |= {name: partial(make, period=4) for name, make in strategies.items() if name in LOCAL}
    report = check(Sound, data, strategies=strategies, pool=rank_pool)

    report.raise_if_different()
    assert [row.strategy for row in report.rows] == names
    refused = {row.strategy: row.sentence for row in report.rows if row.outcome == "refused"}
    assert refused.keys() == {"paral_zero3_nvme", *LOCAL}
    assert "promises the numbers of one process" in refused["paral_diloco"]
    for row in report.rows:
        if row.outcome == "equal":
            assert row.precision == ("32-true" if "zero" in row.strategy else "64-true")
            assert row.largest < (1e-5 if "zero" in row.strategy else 1e-12)
            assert row.resumed.startswith("resumed under paral_"), row
    assert report.notes == ()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (planted.ScaledGradient, "step 1: gradient norm of optimizer 0 differs by 1.6e-02"),
        (planted.BufferOfRank, "step 1: buffer mean differs by"),
        (planted.LogDividedTwice, "step 4: validation val_loss differs by"),
        (planted.CountsTwice, "step 4: validation val_loss differs by"),
    ],
)
def test_planted_difference_is_named(rank_pool, make: Callable[[], Any], found: str) -> None:
    row = row_of(rank_pool, make, None if make is planted.CountsTwice else data)

    assert row.outcome == "differs"
    assert row.sentence.startswith(found)


def test_write_on_one_rank_is_named_with_the_rank(rank_pool) -> None:
    row = row_of(rank_pool, Sound, trainer={"callbacks": [WritesOnOneRank()]})

    assert row.sentence == "step 3: parameter layers.3.weight differs by 3.0e-02 on rank 1"


@pytest.mark.parametrize(
    ("make", "found"),
    [(planted.Forgets, "loss differs by"), (planted.LosesMomentum, "parameter layers.")],
)
def test_what_is_lost_on_resume_is_named(rank_pool, make: Callable[[], Any], found: str) -> None:
    row = row_of(rank_pool, make)

    assert row.sentence.startswith(f"equal until resumed under paral_fsdp on 1 rank: step 5: {found}")


@pytest.mark.parametrize("strategy", ["paral_ddp", "paral_zero2"])
@pytest.mark.parametrize(
    ("make", "make_data", "options", "cause"),
    [
        (Sound, data, {"keep_dropout": True}, "random numbers are drawn in the step"),
        (planted.Noisy, data, {}, "random numbers are drawn in the step"),
        (Sound, planted.augmented, {}, "random numbers are drawn by the dataset"),
        (planted.WithBatchNorm, data, {}, "BatchNorm (layers.1) normalizes the samples of each rank"),
    ],
)
def test_known_cause_is_named(
    rank_pool, make: Any, make_data: Any, options: dict[str, Any], cause: str, strategy: str
) -> None:
    row = row_of(rank_pool, make, make_data, strategies=(strategy,), **options)

    assert row.outcome == "differs", row
    assert row.causes == (cause,)


def test_data_that_differ_between_two_readings_are_said_first(rank_pool) -> None:
    report = check(planted.Unordered, strategies=DDP, pool=rank_pool)

    start = (
        "The data differ between two readings: two runs in one process from the same seed are not equal. step 1: batch"
    )
    assert report.notes[0].startswith(start)


def test_logged_time_is_not_compared(rank_pool) -> None:
    report = check(planted.LogsTime, data, strategies=DDP, pool=rank_pool)

    report.raise_if_different()
    assert "Not compared, because two runs in one process log different values: seconds." in report.notes


@pytest.mark.parametrize(
    ("make", "precision"),
    [(planted.InFloat32, "32-true"), (planted.LossInFloat32, "32-true"), (planted.InFloat32, "bf16-mixed")],
)
def test_module_that_does_not_train_in_fp64_is_compared_in_its_precision(rank_pool, make: Any, precision: str) -> None:
    row = row_of(rank_pool, make, strategies=("paral_fsdp",), trainer={"precision": precision})

    assert row.outcome == "equal", row
    assert row.precision == precision


def test_batch_smaller_than_the_ranks(rank_pool) -> None:
    row = row_of(rank_pool, Sound, planted.single)

    assert row.outcome == "refused"
    assert row.sentence.startswith("split='global' divides each batch among 2 ranks, but the training loader has batch")


def test_hang_is_bounded_and_named(rank_pool) -> None:
    assert row_of(rank_pool, Sound).outcome == "equal"  # the ranks have started, and imported what a run needs
    row = row_of(rank_pool, planted.Hangs, timeout=8.0)

    assert row.outcome == "fails"
    assert "rank 1: no answer in time, in `training_step` (planted.py:" in row.sentence


@pytest.mark.parametrize(
    ("make", "make_data", "named"),
    [
        (planted.NeedsGPU, data, "AssertionError: Torch not compiled with CUDA enabled (training_step, planted.py:"),
        (Sound, None, "`train_dataloader` must be implemented"),
        (Sound, planted.too_few, "no step: no optimizer step was taken"),
    ],
)
def test_reference_that_fails_is_an_error(rank_pool, make: Any, make_data: Any, named: str) -> None:
    with pytest.raises(ReferenceFailedError) as raised:
        check(make, make_data, strategies=DDP, pool=rank_pool)

    assert str(raised.value).startswith("The run in one process, with strategy='auto', failed: ")
    assert named in str(raised.value)


def test_mistakes_in_the_call() -> None:
    with pytest.raises(ConfigurationError, match="Define them at the top level"):
        check(lambda: Sound(), data)
    with pytest.raises(ConfigurationError, match="Did you mean 'paral_fsdp'"):
        check(Sound, data, strategies=("paral_fdsp",))
    with pytest.raises(ConfigurationError, match="ranks=0 and steps=8 were given"):
        check(Sound, data, ranks=0)


def test_report_raises_if_a_row_differs() -> None:
    equal, differs = (CheckRow(strategy=word, outcome=word) for word in ("equal", "differs"))  # type: ignore[arg-type]

    CheckReport(rows=(equal,)).raise_if_different()
    with pytest.raises(DifferenceError, match=r"^differs differs: "):
        CheckReport(rows=(equal, differs)).raise_if_different()


def test_command_checks_the_configured_strategy(launch, tmp_path: Path) -> None:
    config = tmp_path / "two.yaml"
    config.write_text("trainer: {strategy: {class_path: lightning_paral.ParalFSDPStrategy, init_args: {replicate: 2}}}")
    command = (
        "-m",
        "lightning_paral",
        "check",
        "--config",
        "configs/gpt.yaml",
        "--config",
        str(config),
        "--steps",
        "2",
    )
    small = ("--model.width", "32", "--model.num_layers", "1", "--data.batch_size", "4", "--json")
    process = launch(*command, *small)
    (printed,) = outputs(process)

    assert process.returncode == 0, printed
    report = json.JSONDecoder().raw_decode(printed, printed.index("\n{\n") + 1)[0]
    assert [row["strategy"] for row in report["rows"]] == ["configured", *DEFAULT]
    assert {row["outcome"] for row in report["rows"]} == {"equal"}


@pytest.mark.parametrize(
    ("model", "status", "said"),
    [
        ("Noisy", 1, "Possible cause: random numbers are drawn in the step."),
        (
            "NeedsGPU",
            2,
            "paral: The run in one process, with strategy='auto', failed: AssertionError: Torch not compiled",
        ),
    ],
)
def test_status_of_the_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    model: str,
    status: int,
    said: str,
) -> None:
    config = tmp_path / "check.yaml"
    config.write_text(f"model: tests.models.planted.{model}\ndata: tests.models.planted.Samples")

    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # LightningCLI sets it
    with isolate_rng(), pytest.raises(SystemExit) as ended:
        check_command(["--config", str(config), "--strategies", "paral_ddp"])

    assert ended.value.code == status
    assert said in "".join(capfd.readouterr())


SCRIPT = """\
from lightning_paral import check
from tests.launching import outputs
from tests.models import planted
from tests.models.planted import Sound, data

print(check(Sound, data, strategies=["paral_ddp"], steps=2).rows)
"""


def test_script_without_a_guard(launch, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = launch(str(tmp_path / "script.py"))
    (printed,) = outputs(process)

    assert process.returncode != 0
    assert "if __name__ == '__main__':" in printed, printed  # Python's own error
