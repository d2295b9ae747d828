"""The peak of a followed step equals the allocator's peak of a real one."""

from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import LightningModule

from lightning_paral.planning.following import FollowedSteps, follow_steps
from lightning_paral.planning.memory.ledger import Item, Ledger
from lightning_paral.planning.settings import StepSettings
from lightning_paral.planning.timeline import Kind, Timeline
from tests.models.hugging_face import made, tokens
from tests.unit.planning.measured import peak_of_step
from tests.unit.planning.models import Language, bytes_of_text, gpt


def peak_of(timeline: Timeline, followed: FollowedSteps) -> int:
    """Return the peak of one process without a strategy."""
    states, ledger = followed.states, Ledger()
    ledger.add(Item.PARAMETERS, states.parameter_bytes + states.gradient_bytes + states.optimizer_bytes)
    ledger.add(Item.ACTIVATIONS, states.buffer_bytes + timeline.initial_bytes)
    for moment in timeline.moments:
        if moment.kind in (Kind.ACTIVATION, Kind.CAST, Kind.GRADIENT, Kind.TEMPORARY):
            ledger.add(Item.ACTIVATIONS, moment.size)
    return ledger.result().peak_bytes


CASES: dict[str, tuple[Callable[[], LightningModule], Callable[[], Any]]] = {
    "gpt": (gpt, bytes_of_text),
    "llama": (lambda: Language(made("LlamaForCausalLM")), tokens),
    "bert": (lambda: Language(made("BertForSequenceClassification")), tokens),
    "t5": (lambda: Language(made("T5ForConditionalGeneration")), tokens),
}


@pytest.mark.parametrize("name", CASES)
def test_peak_of_a_step_equals_the_allocators(name: str) -> None:
    make, batch = CASES[name]

    followed = follow_steps(make, batch(), StepSettings())

    assert peak_of(followed.plain, followed) == pytest.approx(peak_of_step(make(), batch()), rel=0.05)


def test_peak_with_recomputation_equals_the_allocators() -> None:
    followed = follow_steps(gpt, bytes_of_text(16), StepSettings())

    assert followed.recomputed is not None
    peak = peak_of(followed.recomputed, followed)
    assert peak == pytest.approx(peak_of_step(gpt(), bytes_of_text(16), recomputes=True), rel=0.05)
    assert peak < 0.6 * peak_of(followed.plain, followed)


def test_peak_under_autocast_equals_the_allocators() -> None:
    followed = follow_steps(gpt, bytes_of_text(), StepSettings(precision="bf16-mixed"))

    expected = peak_of_step(gpt(), bytes_of_text(), precision="bf16-mixed")
    assert peak_of(followed.plain, followed) == pytest.approx(expected, rel=0.05)
