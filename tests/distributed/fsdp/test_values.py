"""Arrays that hooks make of sharded parameters cannot be written to."""

from typing import Any

from tests.models.regression import Regression, regression_data
from tests.running import quiet_trainer


class WritesArray(Regression):
    def on_train_batch_end(self, *args: Any) -> None:
        array: Any = self.hidden.weight.data.numpy()
        array *= 2


def written_array(strategy: str) -> str:
    try:
        quiet_trainer(max_steps=1, devices=2, strategy=strategy).fit(WritesArray(), regression_data(2, 2))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_arrays_of_sharded_tensors_are_read_only(on_ranks) -> None:
    assert all("read-only" in said for said in on_ranks(2, written_array, "paral_fsdp"))
