"""Messages between two stages, of which some are expected."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_paral.comm.channel import Channel, TensorSpec, with_tensors
from lightning_paral.compat.torch.tensors import tree_map_only

SHAPES = [(2, 3), (2, 3), (4,), (4,), (2, 3), (0, 3), (5, 1)]


def message(number: int) -> Any:
    values = torch.arange(float(torch.Size(SHAPES[number]).numel())).view(SHAPES[number]) + number
    flags = torch.full((3,), number)
    return {"values": values, "more": (flags, "even" if number % 2 == 0 else None)}


def exchange(expected: list[int]) -> list[Any]:
    """Send messages from rank 0 to rank 1, `expected` of them in each step, and gradients back."""
    rank, device = dist.get_rank(), torch.device("cpu")
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    there, back = (Channel(group, 1 - rank, device) for group in groups)
    received: list[Any] = []
    numbers = iter(range(len(SHAPES)))
    for size in expected:
        there.expect(size)
        back.expect(size)
        of_step = [next(numbers) for _ in range(max(size, 1))]
        if rank == 0:
            for number in of_step:
                there.send(message(number))
            answers = [back.post_tensors([TensorSpec.of(message(number)["values"])]) for number in of_step]
            received += [answer()[0] for answer in answers]
        else:
            for _ in of_step:
                values, tensors = there.receive()
                received.append(with_tensors(values, tensors))
                back.send_tensors([2 * received[-1]["values"]])
        there.finish()
        back.finish()
        there.expect(0)
        back.expect(0)
    for group in groups:
        dist.destroy_process_group(group)
    return received


@pytest.mark.parametrize("expected", [[7], [0] * 7, [3, 0, 1, 2]], ids=str)
def test_messages_arrive_whatever_their_shapes(on_ranks, expected: list[int]) -> None:
    answers, received = on_ranks(2, exchange, expected)

    sent = [message(number) for number in range(len(SHAPES))]
    for answer, original in zip(answers, sent, strict=True):
        torch.testing.assert_close(answer, 2 * original["values"])
    for found, original in zip(received, sent, strict=True):
        assert found["more"][1] == original["more"][1]
        assert tree_map_only(torch.Tensor, torch.Tensor.tolist, found) == tree_map_only(
            torch.Tensor, torch.Tensor.tolist, original
        )
