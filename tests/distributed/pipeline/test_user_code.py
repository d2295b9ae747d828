"""What people write in modules and callbacks equals one process in a pipeline as well, or is refused."""

import pytest

import tests.contract.user_code.themes  # noqa: F401  registers the rows
from tests.contract.user_code.columns import PIPELINE
from tests.contract.user_code.outcomes import columns_of, outcome
from tests.contract.user_code.rows import ROWS
from tests.rank_pool import RankPool

UNCLEAR = {
    "gradients read while they accumulate": "AttributeError: 'NoneType'",
    "gradients by torch.autograd.grad of inputs": "RuntimeError: The differentiated Tensor",
    "module with attention": "RuntimeError: The size of tensor a",  # two chains, of which the second begins elsewhere
    "optimizer state read in a hook": "KeyError: 'exp_avg'",
    "trained rewound in on_before_optimizer_step": "RuntimeError: Error(s) in loading state_dict",
    "trained rewound in on_train_batch_end": "RuntimeError: Error(s) in loading state_dict",
    "target loaded in training_step": "RuntimeError: Error(s) in loading state_dict",
}
"""Rows that fail with an error of torch or Python, which does not say what a pipeline has to do with it."""


@pytest.mark.parametrize("row", [row.label for row in ROWS.values() if "paral_tp" in columns_of(row)])
def test_user_code_equals_one_process_or_fails(row: str, rank_pool: RankPool) -> None:
    found = outcome(row, PIPELINE.label, rank_pool)

    if row in UNCLEAR:
        assert found.kind == "fails", found
        assert UNCLEAR[row] in found.reason
    else:
        assert found.is_allowed, f"{found.kind}: {found.reason}\n{found.detail}"
