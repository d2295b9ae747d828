"""The counters with which stage 3 numbers modules and parameters. DeepSpeed never resets them in a process."""

from typing import Any

from lightning_paral.compat.private_name import Names, named

NAMES: Names = {
    "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload": {
        "_register_deepspeed_module(module, count)": "number modules equally on all ranks (`count` is mutable)",
    },
    "deepspeed.runtime.zero.partition_parameters.Init": {
        "param_id": "make all ranks number parameters equally after different earlier runs",
    },
}


def read_counters() -> list[int]:
    """Return how many modules and parameters this process has numbered so far."""
    from deepspeed.runtime.zero.partition_parameters import Init

    return [_num_modules()[0], Init.param_id]


def set_counters(values: list[int]) -> None:
    """Set the numbers of the next module and of the next parameter to `values`, as `read_counters` returned them."""
    from deepspeed.runtime.zero.partition_parameters import Init

    _num_modules()[0], Init.param_id = values


def _num_modules() -> list[int]:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    defaults: Any = DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__
    match defaults:
        case ([int()],):
            count: list[int] = defaults[0]
            return count
    raise named(NAMES, "_register_deepspeed_module").error(
        f"its defaults are {defaults} instead of a list with one number"
    )
