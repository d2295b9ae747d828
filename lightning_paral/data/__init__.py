"""Which samples a rank draws: every sample once in evaluation, equal steps on all ranks in training."""

from lightning_paral.data.injection import Injection
from lightning_paral.data.predictions import GatherPredictions

__all__ = ["GatherPredictions", "Injection"]
