"""The example's GPT trains to the same loss under every configuration as under DDP."""

import os
import sys
from pathlib import Path

import pytest

from lightning_paral.cli import main
from tests.unit.cli.test_commands import OVERLAYS, ROOT, Witness

SHORT = (
    "--trainer.max_steps=4 --trainer.limit_val_batches=0 --trainer.num_sanity_val_steps=0 --trainer.accelerator=cpu "
    "--trainer.logger=false --trainer.enable_checkpointing=false --trainer.enable_progress_bar=false "
    "--trainer.enable_model_summary=false --trainer.callbacks+=tests.unit.cli.test_commands.Witness "
    "--model.init_args.width=32 --model.init_args.num_layers=4"
)
NUM_RANKS = 2
GLOBAL_BATCHES = (
    "--trainer.strategy=lightning_paral.ParalDDPStrategy",
    "--trainer.strategy.init_args.split=global",
)
TOLERANCES = {"ddp_ring": 1e-3}  # gradients cross the wire in bf16


def last_loss(overlay: str, folder: str, *more: str) -> float:
    """Return the loss of the last step on the samples of this rank."""
    os.chdir(ROOT)
    arguments = ["--config", "configs/gpt.yaml", "--config", f"configs/strategies/{overlay}.yaml", *SHORT.split()]
    arguments += [f"--trainer.default_root_dir={folder}", "--data.init_args.batch_size=4", *more]
    if "nvme" in overlay:
        arguments += [
            f"--trainer.strategy.init_args.offload_{what}.path={folder}" for what in ("optimizer", "parameters")
        ]
    sys.argv = ["paral", "fit", *arguments]
    main()
    return Witness.trainer.callback_metrics["train_loss"].item()


IN_FULL = ("fsdp", "zero2", "tp", "pp", "pp_tp")
"""One overlay of each engine, for the full lane."""


@pytest.mark.parametrize(
    "overlay",
    [
        pytest.param(path.stem, marks=pytest.mark.lane("full" if path.stem in IN_FULL else "all"))
        for path in OVERLAYS
        if path.stem not in ("ddp", "dp", "local_sgd", "diloco")  # the last two learn something else
    ],
)
def test_loss_equals_that_under_ddp(on_ranks, tmp_path: Path, overlay: str) -> None:
    draw_the_same = overlay in ("pp", "pp_interleaved", "tp", "pp_tp")
    more = GLOBAL_BATCHES if draw_the_same else ()
    expected = on_ranks(NUM_RANKS, last_loss, "ddp", str(tmp_path), *more)
    if more:
        expected = [sum(expected) / NUM_RANKS] * NUM_RANKS

    if overlay in ("fsdp_tp", "pp_tp"):  # 4 ranks, of which pairs, or all, draw the same samples
        expected = [loss for loss in expected for _ in range(2)]

    losses = on_ranks(len(expected), last_loss, overlay, str(tmp_path))

    assert losses == pytest.approx(expected, rel=TOLERANCES.get(overlay, 1e-4))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("paral_zero")] == []
