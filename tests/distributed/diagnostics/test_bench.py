"""`paral bench` measures what it says, on real ranks. No test looks at the times."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_paral.diagnostics.bench.transformer import SmallTransformer

CONFIG = {
    "model": {
        "class_path": "lightning_paral.diagnostics.bench.transformer.SmallTransformer",
        "init_args": {"width": 16, "num_layers": 2},
    },
    "data": {"class_path": "lightning_paral.diagnostics.bench.transformer.RandomTokenData"},
    "trainer": {"gradient_clip_val": 1.0, "max_epochs": 7, "logger": True},
}


class Broken(SmallTransformer):
    def __init__(self) -> None:
        super().__init__(width=16, num_layers=1)

    def training_step(self, *_: object) -> Any:
        raise ZeroDivisionError("not today")


class Scheduled(SmallTransformer):
    """Asks the Trainer for the number of steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters())
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    model = CONFIG["model"] | {"class_path": f"{__name__}.Scheduled"}
    path.write_text(yaml.safe_dump(CONFIG | {"model": model}))
    return str(path)


@pytest.fixture
def bench(paral) -> Any:
    return lambda *arguments: json.loads(paral("bench", *arguments, "--json", "--timeout", "2"))


def test_comm(bench) -> None:
    found = bench("comm", "--sizes", "64KiB,100000", "--rounds", "3")

    cases = {(row["algorithm"], row["wire"], row["size_bytes"]) for row in found["rows"]}
    assert {case[0] for case in cases if case[1] == "bf16"} == {"ring", "native", "reduce_broadcast", "all_to_all"}
    assert {case[0] for case in cases} > {"reduce_scatter_direct", "reduce_scatter_native"}
    assert {case[2] for case in cases} == {65536, 100000}
    assert all(row["num_rounds"] == 3 and row["seconds"] > 0 for row in found["rows"])
    assert found["machine"]["versions"]["torch"]
    sent = {row["algorithm"]: [number / 100000 for number in row["sent_bytes"]] for row in found["rows"][-12:]}
    assert sent["all_gather"] == pytest.approx([0.5, 0.5], abs=0.02)  # (N-1)/N from each rank
    assert sent["broadcast"] == pytest.approx([1, 0], abs=0.02)  # all from the first


def test_bytes_that_each_of_four_ranks_sends(bench) -> None:
    found = bench("comm", "--ranks", "4", "--sizes", "1MiB", "--rounds", "1", "--wire", "fp32")

    sent = {row["algorithm"]: [number / 2**20 for number in row["sent_bytes"]] for row in found["rows"]}
    assert sent["ring"] == pytest.approx([1.5] * 4, abs=0.02)  # 2(N-1)/N
    assert sent["reduce_broadcast"] == pytest.approx([3, 1, 1, 1], abs=0.02)
    assert sent["all_gather"] == pytest.approx([0.75] * 4, abs=0.02)
    assert max(sent["broadcast"]) > 1.9
    assert min(sent["broadcast"]) < 0.02


def test_step_of_a_configuration(bench, config: str) -> None:
    names = ["paral_ddp", "raw_ddp", "raw_fsdp", "raw_fsdp_direct"]
    found = bench("step", "--config", config, "--rounds", "2", "--steps", "3", "--strategies", ",".join(names))

    rows = {row["strategy"]: row for row in found["rows"]}
    assert list(rows) == names
    assert found["module"] == "Scheduled"
    assert found["batch_size"] == 8
    num_bytes = 4 * found["num_params"]
    for name in ("paral_ddp", "raw_ddp"):
        assert rows[name]["num_steps"] == 6
        assert num_bytes <= rows[name]["sent_bytes"] < 1.5 * num_bytes  # 2(N-1)/N of the gradients, and headers
    assert rows["raw_fsdp"]["sent_bytes"] > 1.2 * num_bytes  # gathers parameters as well
    assert rows["raw_fsdp_direct"]["sent_bytes"] < 0.9 * rows["raw_fsdp"]["sent_bytes"]
    assert rows["paral_ddp"]["ratio_to_raw"] == rows["paral_ddp"]["seconds"] / rows["raw_ddp"]["seconds"]
    assert rows["raw_ddp"]["ratio_to_raw"] is None
    assert all(row["peak_host_bytes"] > 2**27 for row in rows.values())


def test_hand_written_loop_of_deepspeed(bench, config: str) -> None:
    found = bench("step", "--config", config, "--rounds", "1", "--steps", "1", "--strategies", "raw_zero1")

    (row,) = found["rows"]
    assert row["sent_bytes"] > 3.5 * found["num_params"]  # a reduce-scatter and an all-gather in fp32


def test_memory(bench, config: str) -> None:
    options = ("--ranks", "2", "--strategies", "paral_ddp,paral_fsdp", "--model.width", "512", "--data.batch_size", "2")
    found = bench("memory", "--config", config, *options)

    rows = {row["strategy"]: row for row in found["rows"]}
    assert list(rows) == ["paral_ddp", "paral_fsdp"]
    num_params = 2 * (12 * 512**2 + 13 * 512) + (256 + 128 + 256) * 512 + 256
    assert (found["module"], found["num_params"], found["batch_size"]) == ("Scheduled", num_params, 2)
    assert found["unit_bytes"] == 4 * (12 * 512**2 + 13 * 512)
    assert rows["paral_ddp"]["formula_bytes"] == pytest.approx(16 * num_params, rel=0.001)
    assert rows["paral_fsdp"]["formula_bytes"] == pytest.approx(8 * num_params, rel=0.001)
    for row in rows.values():
        assert (row["num_ranks"], row["device"]) == (2, "cpu")
        extra = found["unit_bytes"] + found["activation_bytes"]
        assert row["limit_bytes"] == pytest.approx(1.25 * row["formula_bytes"] + extra, abs=2)
        assert row["peak_bytes"] >= row["start_bytes"] > 0
        assert row["formula_bytes"] < row["peak_bytes"] < row["formula_bytes"] + 2**28
        assert row["planned_ratio"] == row["planned_bytes"] / row["peak_bytes"]
        assert row["start_seconds"] > 0


def test_memory_of_hand_written_loops(bench, config: str) -> None:
    options = ("--ranks", "2", "--strategies", "raw_fsdp,raw_zero3", "--model.width", "512", "--data.batch_size", "1")
    found = bench("memory", "--config", config, *options)

    assert [row["strategy"] for row in found["rows"]] == ["raw_fsdp", "raw_zero3"]
    for row in found["rows"]:
        assert row["formula_bytes"] < row["peak_bytes"] < row["formula_bytes"] + found["activation_bytes"] + 2**29


def test_error_in_a_module_ends_the_benchmark(paral, tmp_path: Path) -> None:
    broken = CONFIG | {"model": {"class_path": "tests.distributed.diagnostics.test_bench.Broken"}}
    path = tmp_path / "broken.yaml"
    path.write_text(yaml.safe_dump(broken))
    said = paral("bench", "step", "--config", path, "--strategies", "raw_ddp")
    assert re.search(r"raw_ddp: rank [01] failed with ZeroDivisionError: not today", said), said


def test_checkpoint(bench, config: str, tmp_path: Path) -> None:
    found = bench(
        *("checkpoint", "--config", config, "--rounds", "1", "--strategies", "paral_fsdp"),
        *("--folder", str(tmp_path), "--cold"),
    )

    (row,) = found["rows"]
    assert row["size_bytes"] > 3 * 4 * found["num_params"]  # weights and two states of AdamW
    assert min(row[name] for name in ("save", "stall", "full", "load", "consolidate", "write", "read")) > 0
    assert found["is_cold"]
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_adam_of_torch(bench) -> None:
    found = bench("adam", "--sizes", "10k", "--threads", "1", "--rounds", "3", "--optimizers", "loop,foreach,fused")

    assert [row["optimizer"] for row in found["rows"]] == ["loop", "foreach", "fused"]
    assert {(row["num_params"], row["num_threads"]) for row in found["rows"]} == {(10_000, 1)}
