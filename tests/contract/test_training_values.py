"""With `split="global"`, every value that a training step logs equals that of one process with the same batches."""

from functools import cache
from typing import Any

import pytest

from tests.contract.cases import BY_LABEL
from tests.models.logging_everything import fit

STRATEGIES = tuple(BY_LABEL[label] for label in ("paral_ddp", "paral_fsdp", "paral_zero2"))
LOADERS = {2: ((9, 4), (11, 5)), 3: ((5, 4), (11, 5), (6, 6), (2, 4))}
"""Numbers of samples and batch sizes, by number of ranks: last batches with fewer samples than ranks, batches that the
number of ranks does not divide, equal parts, and fewer samples than ranks."""
TABLE = [(case.label, size, *loader) for case in STRATEGIES for size, loaders in LOADERS.items() for loader in loaders]
VARIANTS: dict[str, dict[str, Any]] = {
    "manual optimization": {"manual": True},
    "accumulation": {"accumulate": 2},
    "several loaders": {"several": True},
    "workers": {"workers": 2},
    "iterable dataset": {"iterable": True},
    "iterable dataset and workers": {"iterable": True, "workers": 2},
}


@cache
def one_process(num: int, batch_size: int, variant: str = "") -> dict[str, Any]:
    return fit("one process", 1, num, batch_size, **VARIANTS.get(variant, {}))


def differences(found: Any, expected: Any, path: str = "") -> dict[str, Any]:
    """Return the values that differ, with the path to each."""
    if isinstance(expected, dict | list | tuple):
        items = expected.items() if isinstance(expected, dict) else enumerate(expected)
        if (sorted(found) != sorted(expected)) if isinstance(expected, dict) else (len(found) != len(expected)):
            return {path: (found, expected)}
        pairs = [differences(found[name], value, f"{path}/{name}") for name, value in items]
        return {key: each for pair in pairs for key, each in pair.items()}
    return {} if found == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True) else {path: (found, expected)}


def assert_equal_to_one_process(
    ranks: list[dict[str, Any]], expected: dict[str, Any], apart: tuple[str, ...] = ()
) -> None:
    assert ranks[0]["rows"]
    for number, rank in enumerate(ranks):
        skipped = {"rows"} if number else set()
        compared = {key: value for key, value in expected.items() if key not in skipped}
        found = differences({key: rank[key] for key in compared}, compared)
        assert not {path: pair for path, pair in found.items() if not any(name in path for name in apart)}


@pytest.mark.parametrize(("num", "batch_size"), LOADERS[3])
def test_logged_values_of_replicas_equal_those_of_one_process(num: int, batch_size: int) -> None:
    # With a `batch_size` of their own, and in a metric that is updated without one, replicas count the same.
    apart = ("mean_of_steps", "mean_of_eights", "mean_loss", "best")
    assert_equal_to_one_process([fit("paral_dp", 3, num, batch_size)], one_process(num, batch_size), apart)


@pytest.mark.parametrize(("label", "num_ranks", "num", "batch_size"), TABLE)
def test_logged_values_equal_those_of_one_process(
    on_ranks, label: str, num_ranks: int, num: int, batch_size: int
) -> None:
    assert_equal_to_one_process(
        on_ranks(num_ranks, fit, label, num_ranks, num, batch_size), one_process(num, batch_size)
    )


def fit_variant(label: str, devices: int, num: int, batch_size: int, variant: str) -> dict[str, Any]:
    return fit(label, devices, num, batch_size, **VARIANTS[variant])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("label", [case.label for case in STRATEGIES])
def test_logged_values_equal_those_of_one_process_in_other_loops(on_ranks, label: str, variant: str) -> None:
    sizes = (13, 6) if "iterable" in variant else (11, 5)  # parts of a stream are equal except for the last batch

    ranks = on_ranks(3, fit_variant, label, 3, *sizes, variant)

    # In one process, each worker would yield the whole stream.
    assert_equal_to_one_process(ranks, one_process(*sizes, variant.removesuffix(" and workers")))
