"""What is printed about waiting stages."""

from lightning_paral.engines.pipeline.idle_time import idle_message
from lightning_paral.engines.pipeline.schedule import idle_fraction


def test_message_names_the_number_that_halves_waiting() -> None:
    message = idle_message(0.3, 4, 8)

    assert "waited for 30% of training steps 2 to 6" in message
    assert "4 equally fast stages and 8 micro-batches, 27% are expected; 19 micro-batches would halve this" in message
    assert idle_fraction(4, 19) * 2 == idle_fraction(4, 8)
