"""What an error means under ZeRO, and what a write to a parameter costs."""

import torch

from lightning_paral.engines.zero.state import _write_changed
from lightning_paral.engines.zero.user_access import explanation


def read_numel(module: str) -> AttributeError:
    """Return the error of code in `module` that takes `None` for a tensor."""
    try:
        exec("gradient = None\ngradient.numel()", {"__name__": module})
    except AttributeError as error:
        return error
    raise AssertionError


def test_missing_gradient_is_explained_in_code_of_deepspeed_only() -> None:
    of_deepspeed = explanation(read_numel("deepspeed.runtime.zero.stage3"), stage=3)
    assert of_deepspeed is not None
    assert "second backward pass" in of_deepspeed
    assert explanation(read_numel("project.model"), stage=3) is None


def test_writing_a_parameter_to_its_own_memory_copies_nothing() -> None:
    master = torch.ones(8)
    _write_changed(master[2:5], master.view(2, 4).view(-1)[2:5])
    assert master._version == 0
    _write_changed(master[2:5], torch.zeros(3))
    assert master.tolist() == [1, 1, 0, 0, 0, 1, 1, 1]
