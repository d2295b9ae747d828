"""A model of Hugging Face is fine-tuned from the configuration, saved, loaded again, and equals what was trained."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lightning_paral.cli import main
from tests.unit.cli.test_commands import ROOT

SHORT = "--trainer.max_steps=3 --trainer.accelerator=cpu --trainer.logger=false --trainer.enable_checkpointing=false"
SHORT += " --trainer.enable_progress_bar=false --trainer.enable_model_summary=false"
SHORT += " --trainer.callbacks+=tests.distributed.examples.test_fine_tune.Keeps"


class Keeps(Callback):
    """Keeps the trained weights, and how far the first trained one has moved."""

    weights: dict[str, torch.Tensor]

    def on_train_end(self, trainer: Any, module: Any) -> None:
        Keeps.weights = trainer.strategy.full_state_dict(module.model)


def fine_tune(folder: str, pretrained: str, lora_rank: int) -> dict[str, torch.Tensor]:
    os.chdir(ROOT)
    options = [f"--model.folder={folder}", f"--model.pretrained={pretrained}", f"--model.lora_rank={lora_rank}"]
    options.append(f"--trainer.default_root_dir={Path(folder).parent}")  # to which the configuration is written
    sys.argv = ["paral", "fit", "--config", "configs/fine-tune.yaml", *options, *SHORT.split()]
    main()
    return Keeps.weights


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_saved_model_equals_the_trained_one(on_ranks, tmp_path: Path, lora_rank: int) -> None:
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, n_positions=64, vocab_size=256, bos_token_id=0, eos_token_id=0)
    base = GPT2LMHeadModel(config)
    base.save_pretrained(tmp_path / "base")
    before = {name: value.clone() for name, value in base.state_dict().items()}

    trained = on_ranks(2, fine_tune, str(tmp_path / "tuned"), str(tmp_path / "base"), lora_rank)[0]

    if lora_rank:
        peft = pytest.importorskip("peft")
        model = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "tuned"
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    loaded = model.state_dict()
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(loaded[name], value) for name, value in trained.items())
    moved = [
        name for name, value in trained.items() if not torch.equal(value, before.get(name, torch.zeros_like(value)))
    ]
    assert any("lora_B" in name for name in moved) if lora_rank else "transformer.h.0.attn.c_attn.weight" in moved
