from collections import namedtuple

import pytest
import torch

from lightning_paral import ConfigurationError
from lightning_paral.data.parts import gather, join_training_output, weighted_mean

CPU = torch.device("cpu")
Output = namedtuple("Output", "scores labels")


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
            "named": Output(samples, (samples, "same")),
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
    assert type(gathered["named"]) is Output
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
