"""`generate` gives the tokens of one process, although ranks need different numbers of forward passes."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytest.importorskip("transformers")

from lightning_paral.data.evaluation import GatherPredictions
from tests.contract.cases import strategy_of
from tests.models.hugging_face import VOCABULARY, Wrapped, made, tokens
from tests.running import quiet_trainer

NUM_SAMPLES = 5


class OwnLoop(nn.Module):
    """A hand-written loop, as the guide shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.out = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embedding(tokens)))

    def generate(self, tokens: Tensor, max_new_tokens: int, synced_gpus: bool = False) -> Tensor:
        while True:
            missing = torch.tensor(max_new_tokens)
            if synced_gpus:
                dist.all_reduce(missing, dist.ReduceOp.MAX)
            if missing <= 0:
                return tokens
            chosen = self(tokens)[:, -1].argmax(-1, keepdim=True)
            if max_new_tokens > 0:
                tokens = torch.cat([tokens, chosen], 1)
            max_new_tokens -= 1


class Writer(Wrapped):
    """Each sample has a prompt of another length, and generates another number of tokens."""

    def __init__(self, kind: str) -> None:
        super(Wrapped, self).__init__()
        torch.manual_seed(3)
        self.model = OwnLoop() if kind == "own loop" else made(kind)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if isinstance(self.model, OwnLoop):
            return nn.functional.cross_entropy(self.model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        return super().training_step(batch, batch_idx)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        prompt, num_new = batch[:, : 2 + int(batch[0, 0]) % 4], 1 + int(batch[0, 1]) % 7
        if isinstance(self.model, OwnLoop):
            return self.model.generate(prompt, num_new)
        mask = torch.ones_like(prompt)
        return self.model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=num_new, do_sample=False)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        found = self.predict_step(batch, batch_idx)
        self.log("checksum", (found * torch.arange(1, found.shape[1] + 1)).float().sum(), batch_size=1, sync_dist=True)

    test_step = validation_step


def generated(label: str, num_ranks: int, kind: str) -> tuple[list[float], list[Tensor]]:
    """Return what validation in a fit and a test have logged, and all predictions."""
    module = Writer(kind)
    batch_size = 4 if num_ranks == 1 or label == "paral_tp" else 2
    samples = DataLoader(tokens(NUM_SAMPLES), batch_size=1)
    strategy = strategy_of(label)
    trainer = quiet_trainer(strategy=strategy, devices=num_ranks, max_epochs=1, callbacks=[GatherPredictions()])
    trainer.fit(module, DataLoader(tokens(8), batch_size=batch_size), samples)
    logged = [float(trainer.callback_metrics["checksum"])]
    logged += [each["checksum"] for each in trainer.test(module, samples, verbose=False)]
    found = trainer.predict(module, samples)
    assert found is not None
    assert "generate" not in vars(module.model)
    return logged, [each.cpu() for each in found]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "T5ForConditionalGeneration", "own loop"])
@pytest.mark.parametrize("label", ["paral_fsdp", "zero3_partitioned", "paral_zero3_offload", "paral_tp"])
def test_generated_tokens_equal_one_process(on_ranks, label: str, kind: str) -> None:
    logged, predicted = generated("one process", 1, kind)
    assert len({len(each[0]) for each in predicted}) > 1
    for found in on_ranks(2, generated, label, 2, kind):
        assert found[0] == logged
        assert all(torch.equal(one, other) for one, other in zip(found[1], predicted, strict=True))
