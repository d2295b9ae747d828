"""Ranks log at INFO which process group they have joined. By default nothing is logged."""

import logging

import torch.distributed as dist

from lightning_paral.distributed import process_group
from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class Collecting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def messages_of_a_fit(level: int) -> list[str]:
    handler = Collecting()
    process_group.log.addHandler(handler)
    before = process_group.log.level
    process_group.log.setLevel(level)
    try:
        trainer = quiet_trainer(strategy="paral_ddp", devices=dist.get_world_size(), max_steps=1)
        trainer.fit(Regression(), regression_data(1, 2))
    finally:
        process_group.log.setLevel(before)
        process_group.log.removeHandler(handler)
    return handler.messages


def test_rank_world_size_backend_and_device_of_the_group_are_logged_at_info(on_ranks) -> None:
    for rank, messages in enumerate(on_ranks(2, messages_of_a_fit, logging.INFO)):
        (message,) = messages
        assert message == f"process group reused: rank {rank} of 2, backend cpu:gloo,cuda:gloo, device cpu"
