from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from transformers import BatchEncoding

from lightning_paral import ConfigurationError
from lightning_paral.data.parts import gather, join_training_output, split_batch, weighted_mean

CPU = torch.device("cpu")
TWO = [CPU] * 2
Pair = namedtuple("Pair", "inputs targets")


@dataclass(frozen=True)
class Record:
    inputs: Tensor
    name: str
    scale: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", torch.tensor(2.0))


@pytest.mark.parametrize(
    ("num_samples", "num_devices", "sizes"),
    [(6, 4, [1, 2, 1, 2]), (5, 2, [2, 3]), (4, 4, [1, 1, 1, 1]), (2, 3, [1, 1]), (1, 4, [1]), (0, 2, [0]), (7, 1, [7])],
)
def test_sizes_differ_by_at_most_one_and_no_device_is_idle_without_need(num_samples, num_devices, sizes) -> None:
    batch = torch.arange(num_samples * 3).view(num_samples, 3)

    parts, found = split_batch(batch, [torch.device("cpu")] * num_devices)

    assert found == sizes
    assert torch.equal(torch.cat(parts), batch)
    assert [len(part) for part in parts] == sizes


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: [x, y],
        lambda x, y: (x, {"deep": [y]}),
        lambda x, y: OrderedDict(x=x, y=y),
        lambda x, y: defaultdict(list, x=x, y=y),
        lambda x, y: BatchEncoding({"x": x, "y": y}),
        lambda x, y: Pair(x, [y]),
    ],
    ids=["list", "nested", "OrderedDict", "defaultdict", "BatchEncoding", "namedtuple"],
)
def test_collections_are_divided_item_by_item_and_keep_their_type(make) -> None:
    x, y = torch.randn(4, 3), torch.arange(4)
    batch = make(x, y)

    parts, sizes = split_batch(batch, TWO)

    assert sizes == [2, 2]
    for part, samples in zip(parts, (slice(0, 2), slice(2, 4)), strict=True):
        assert type(part) is type(batch)
        assert _equal(part, make(x[samples], y[samples]))
    assert _equal(batch, make(x, y))


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    if hasattr(first, "keys"):
        return first.keys() == second.keys() and all(_equal(first[key], second[key]) for key in first)
    return len(first) == len(second) and all(map(_equal, first, second))


def test_dataclass_is_divided_even_if_frozen() -> None:
    batch = Record(torch.arange(4), "all")

    (first, second), _ = split_batch(batch, TWO)

    assert first.inputs.tolist() == [0, 1]
    assert second.inputs.tolist() == [2, 3]
    assert (first.name, first.scale.item()) == ("all", 2.0)
    assert batch.inputs.tolist() == [0, 1, 2, 3]


def test_lists_of_one_item_per_sample_are_divided_and_everything_else_is_shared() -> None:
    shared = object()
    batch = {
        "x": torch.arange(3),
        "paths": ["a", "b", "c"],
        "names": ("d", "e", "f"),
        "image_size": (3, 224, 224),
        "other": ["g", "h"],
        "scale": torch.tensor(2),
        "shared": shared,
        "nothing": None,
    }

    (first, second), _ = split_batch(batch, TWO)

    assert (first["paths"], second["paths"]) == (["a"], ["b", "c"])
    assert (first["names"], second["names"]) == (("d",), ("e", "f"))
    for part in (first, second):
        assert part["image_size"] == (3, 224, 224)
        assert part["other"] == ["g", "h"]
        assert part["scale"].item() == 2
        assert part["shared"] is shared
        assert part["nothing"] is None


def test_packed_sequences_are_refused() -> None:
    packed = pack_sequence([torch.randn(length, 2) for length in (5, 3, 1)])

    with pytest.raises(ConfigurationError, match=r"batch\[0\] is a PackedSequence.*paral_ddp"):
        split_batch([packed, torch.arange(3)], TWO)


@pytest.mark.parametrize("batch", ["text", None, {"a": torch.tensor(1.0)}, [], object()])
def test_batch_without_samples_goes_to_one_device(batch: object) -> None:
    assert split_batch(batch, TWO) == ([batch], [1])


def test_changing_a_sub_batch_in_place_changes_no_other() -> None:
    weight = torch.ones(4, 2, requires_grad=True)
    (first, second), _ = split_batch(torch.ones(4, 2), TWO)

    product = (first * weight[:2]).sum()
    second.mul_(2)
    product.backward()  # would fail if `second` shared its version counter with `first`

    assert torch.equal(weight.grad[:2], torch.ones(2, 2))


def test_tensors_of_different_first_dimensions_are_named() -> None:
    batch = {"x": torch.zeros(8, 3), "y": torch.zeros(8), "extra": [torch.zeros(10)]}

    with pytest.raises(ConfigurationError, match=r"batch\['x'\] has 8.*extra.*has 10.*buffer.*paral_ddp"):
        split_batch(batch, TWO)


def test_weighted_means_and_their_gradients_equal_those_of_all_samples() -> None:
    samples = torch.randn(7, dtype=torch.float64, requires_grad=True)
    parts = samples.split([3, 4])

    mean = weighted_mean([part.square().mean() for part in parts], [3, 4], CPU)

    torch.testing.assert_close(mean, samples.square().mean())
    torch.testing.assert_close(torch.autograd.grad(mean, samples)[0], 2 / 7 * samples.detach())


def test_each_kind_of_output_equals_one_process() -> None:
    def outputs(samples: torch.Tensor) -> dict[str, object]:
        return {
            "scores": samples * 2,
            "mean": samples.float().mean(),
            "mean_as_number": samples.float().mean().item(),
            "num_odd": (samples % 2).sum(),
            "num": len(samples),
            "texts": [str(sample) for sample in samples.tolist()],
            "records": [{"value": sample} for sample in samples],
            "pair": [samples, samples + 1],
            "named": Pair(samples, (samples, "same")),
            "flag": True,
            "text": "same",
            "nothing": None,
        }

    samples = torch.arange(5)
    parts = samples.split([2, 3])

    gathered, expected = gather([outputs(part) for part in parts], [2, 3], CPU), outputs(samples)

    assert gathered.keys() == expected.keys()
    assert gathered.pop("mean_as_number") == pytest.approx(expected.pop("mean_as_number"))
    torch.testing.assert_close(gathered.pop("mean"), expected.pop("mean"))
    assert type(gathered["named"]) is Pair
    assert str(gathered) == str(expected)


def test_training_output_has_the_weighted_loss_and_the_rest_gathered() -> None:
    first, second = torch.tensor(1.0), torch.tensor(4.0)

    assert join_training_output([first, second], [1, 2], CPU).item() == 3.0
    assert join_training_output([first[None], second[None]], [1, 2], CPU).tolist() == [3.0]
    joined = join_training_output(
        [{"loss": first, "scores": torch.zeros(1)}, {"loss": second, "scores": torch.ones(2)}], [1, 2], CPU
    )
    assert joined["loss"].item() == 3.0
    assert joined["scores"].tolist() == [0.0, 1.0, 1.0]


def test_replicas_that_skip_are_left_out_of_the_loss() -> None:
    loss = torch.tensor(5.0)

    assert join_training_output([None, None], [2, 2], CPU) is None
    assert join_training_output([None, loss], [2, 3], CPU) is loss


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([torch.zeros(2), {"a": torch.zeros(2)}], "different types.*Tensor.*dict"),
        ([{"a": 1, "b": 2}, {"a": 1}], r"different keys.*\['a', 'b'\] and \['a'\]"),
        ([None, torch.zeros(2)], "different types"),
    ],
)
def test_outputs_of_different_types_are_refused(outputs, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        gather(outputs, [2, 2], CPU)
