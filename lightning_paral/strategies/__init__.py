"""The strategies. Sections of each: process group, model wrapping, sampler injection, checkpoint."""

from lightning_paral.strategies.auto import ParalAutoStrategy
from lightning_paral.strategies.ddp import ParalDDPStrategy
from lightning_paral.strategies.dp import ParalDPStrategy
from lightning_paral.strategies.fsdp import ParalFSDPStrategy
from lightning_paral.strategies.pipeline import ParalPipelineStrategy
from lightning_paral.strategies.zero import ParalZeROStrategy

__all__ = [
    "ParalAutoStrategy",
    "ParalDDPStrategy",
    "ParalDPStrategy",
    "ParalFSDPStrategy",
    "ParalPipelineStrategy",
    "ParalZeROStrategy",
]
