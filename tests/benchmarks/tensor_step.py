"""Time training steps of a Llama under `paral_tp`, and in a loop with torch's `parallelize_module`.

    python -m tests.benchmarks.tensor_step

Two ranks. Rounds of both alternate in the same processes; a time is the median over all rounds. The model, the
optimizer, the batches and the layers that are split are the same; the loop gathers its logits.
"""

import time
from typing import Any

import torch
import transformers
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_paral import ParalFSDPStrategy
from tests.benchmarks.common import NUM_STEPS, StepTimes, compare, times_and_loss
from tests.running import quiet_trainer

VOCABULARY, CONTEXT, BATCH_SIZE = 512, 128, 8


SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


class Llama(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(vocab_size=VOCABULARY, **SHAPE, **HEADS, max_position_embeddings=CONTEXT)
        self.model = transformers.LlamaForCausalLM(config).train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def module() -> Llama:
    torch.manual_seed(0)
    return Llama()


def batches() -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(torch.randint(0, VOCABULARY, (NUM_STEPS * BATCH_SIZE, CONTEXT), generator=generator), BATCH_SIZE)


def under_paral_tp() -> tuple[list[float], float]:
    times = StepTimes()
    strategy = ParalFSDPStrategy(tensor_parallel="node", divergence_check_every=None)
    trainer = quiet_trainer(devices=2, strategy=strategy, max_epochs=1, callbacks=[times])
    trainer.fit(module(), batches())
    return times_and_loss(times.starts, times.losses[-1])


def by_hand() -> tuple[list[float], float]:
    llama = module()
    mesh = init_device_mesh("cpu", (2,))
    plan: Any = {"model.embed_tokens": RowwiseParallel(input_layouts=Replicate())}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    for number in range(len(llama.model.model.layers)):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"model.layers.{number}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"model.layers.{number}.{name}"] = RowwiseParallel()
    parallelize_module(llama.model, mesh, plan)
    optimizer = llama.configure_optimizers()
    starts, loss = [], torch.zeros(())
    for number, batch in enumerate(batches()):
        starts.append(time.perf_counter())
        loss = llama.training_step(batch, number)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert not isinstance(loss, DTensor)
    return times_and_loss(starts, loss.item())


if __name__ == "__main__":
    compare({"parallelize_module": by_hand, "paral_tp": under_paral_tp}, "paral_tp")
