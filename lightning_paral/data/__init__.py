"""Which samples a rank draws: each sample once in evaluation, the same number of steps on all ranks in training."""

from lightning_paral.data.evaluation import GatherPredictions

__all__ = ["GatherPredictions"]
