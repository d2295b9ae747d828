"""`paral bench` measures what it says, on real ranks. No test looks at the times."""

import json
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


@pytest.mark.lane("all")
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
