"""The classes of strategies have their bases in the right order."""

import pytest

from lightning_paral.registry import STRATEGIES


@pytest.mark.parametrize("strategy", sorted({entry.strategy for entry in STRATEGIES}, key=lambda kind: kind.__name__))
def test_our_mixins_come_before_lightnings_classes(strategy: type) -> None:
    ours = [kind.__module__.startswith("lightning_paral.") for kind in strategy.__mro__]

    assert ours == sorted(ours, reverse=True), [kind.__name__ for kind in strategy.__mro__]
