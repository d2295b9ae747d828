"""A plan's row for a strategy object: what of its options counts, and what the plan says it cannot count."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_paral import (
    STRATEGIES,
    ActivationCheckpointing,
    ConfigurationError,
    Offload,
    ParalAutoStrategy,
    ParalDDPStrategy,
    ParalFSDPStrategy,
    ParalZeROStrategy,
    plan,
)
from lightning_paral.cli.plan import plan_command
from lightning_paral.planning.estimate import Estimate
from lightning_paral.planning.layout import LAYOUTS
from tests.unit.planning.models import bytes_of_text, gpt


def row_of(strategy: Any, **options: Any) -> Estimate:
    return plan(gpt(), bytes_of_text(4), 4, strategies=[strategy], **options).estimates[0]


def test_objects_of_registered_strategies_have_their_layouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARAL_NVME_PATH", str(tmp_path))
    layouts = [entry.strategy(**entry.arguments).layout for entry in STRATEGIES]  # type: ignore[attr-defined]

    assert layouts == [None, *LAYOUTS, None, None, None]  # NOT_PLANNED: paral_auto, tensor parallel and paral_pp


@pytest.mark.parametrize(
    ("strategy", "uncounted"),
    [
        (lambda: ParalFSDPStrategy(prefetch=2, reduce_dtype="bf16"), ("prefetch=2", "reduce_dtype='bf16'")),
        (
            lambda: ParalZeROStrategy(stage=3, offload_optimizer=Offload(ratio=0.5)),
            ("offload_optimizer with ratio=0.5",),
        ),
    ],
)
def test_options_that_cannot_be_counted_are_named(strategy: Any, uncounted: tuple[str, ...]) -> None:
    made = plan(gpt(), bytes_of_text(4), 4, strategies=["paral_ddp", strategy()])

    assert made.estimates[-1].layout.uncounted == uncounted
    assert f"Not counted: {', '.join(uncounted)}." in made.notes[0]
    assert made.notes[0] in " ".join(str(made).split())


def test_options_that_count_change_the_row() -> None:
    fsdp, two_replicas = row_of("paral_fsdp"), row_of(ParalFSDPStrategy(replicate=2))
    kept = row_of(ParalFSDPStrategy(reshard_after_forward=False))
    assert two_replicas.memory.by_item != fsdp.memory.by_item
    assert two_replicas.wire_bytes < fsdp.wire_bytes
    assert kept.memory.peak_bytes > fsdp.memory.peak_bytes
    assert kept.wire_bytes == pytest.approx(fsdp.wire_bytes * 2 / 3, rel=0.01)

    ddp, narrow = row_of("paral_ddp"), row_of(ParalDDPStrategy(wire_dtype="bf16"))
    assert narrow.wire_bytes == ddp.wire_bytes / 2
    assert row_of(ParalDDPStrategy(gradient_as_bucket_view=True)).memory.peak_bytes < ddp.memory.peak_bytes
    assert row_of(ParalDDPStrategy(all_reduce="all_to_all")).wire_bytes == 2 * ddp.wire_bytes

    on_host = row_of(ParalZeROStrategy(stage=3, offload_optimizer="cpu"), device_type="cuda")
    assert on_host.memory.host_bytes > 0
    assert on_host.layout.parameter_place == "device"
    recomputed = ParalFSDPStrategy(activation_checkpointing=ActivationCheckpointing())
    assert row_of(recomputed).memory.peak_bytes < fsdp.memory.peak_bytes


def test_rows_of_objects_are_labelled_and_not_recommended_by_a_name_that_lacks_options() -> None:
    made = plan(gpt(), bytes_of_text(4), 4, "1GiB", strategies=[ParalFSDPStrategy(), ParalFSDPStrategy(replicate=4)])

    assert [each.layout.name for each in made.estimates] == ["configured", "configured 2"]
    assert "Use the configured" in made.advice.text
    assert "The row configured 2 is paral_fsdp with replicate=4." in made.notes
    assert all(row["is_configured"] for row in made.as_dict()["strategies"])


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (ParalAutoStrategy(), "ParalAutoStrategy cannot be planned"),
        (ParalFSDPStrategy(replicate=3), "replicate=3 does not divide the 4 ranks"),
    ],
)
def test_objects_that_cannot_be_planned_are_refused(strategy: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        row_of(strategy)


def planned_by_command(folder: Path, capsys: pytest.CaptureFixture[str], strategy: Any) -> tuple[dict[str, Any], str]:
    config = {
        "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
        "data": {"class_path": "lightning.pytorch.demos.boring_classes.BoringDataModule"},
        "trainer": {"devices": 4, **({} if strategy is None else {"strategy": strategy})},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    plan_command(["--config", str(folder / "config.yaml"), "--strategies", "paral_ddp,paral_fsdp", "--json"])
    printed = capsys.readouterr()
    return json.loads(printed.out), printed.err


def test_command_plans_the_configured_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"stage": 3, "offload_optimizer": "cpu", "gather_bucket_numel": 7}
    strategy = {"class_path": "lightning_paral.ParalZeROStrategy", "init_args": options}

    row = planned_by_command(tmp_path, capsys, strategy)[0]["strategies"][0]

    assert (row["name"], row["is_configured"], row["strategy"]) == ("configured", True, "paral_zero3_offload")
    assert row["not_counted"] == ["gather_bucket_numel=7"]
    assert row["host_bytes"] > 0


@pytest.mark.parametrize(
    ("strategy", "rows", "said"),
    [
        ("paral_zero2", ["configured", "paral_ddp", "paral_fsdp"], ""),
        ("ddp", ["paral_ddp", "paral_fsdp"], "the configured strategy, ddp, has no row"),
        ({"class_path": "lightning_paral.ParalAutoStrategy"}, ["paral_ddp", "paral_fsdp"], ""),
        (None, ["paral_ddp", "paral_fsdp"], ""),
    ],
)
def test_command_has_a_row_for_a_configured_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: Any, rows: list[str], said: str
) -> None:
    made, errors = planned_by_command(tmp_path, capsys, strategy)

    assert [row["name"] for row in made["strategies"] if not row["recomputes"]] == rows
    assert said in errors
    assert bool(said) == ("has no row" in errors)
