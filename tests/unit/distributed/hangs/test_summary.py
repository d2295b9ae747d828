"""The sentence that says where all ranks are."""

from lightning_paral.distributed.hangs.summary import Answer, summarize

STEP = Answer("", "`training_step` (train.py:41)", waits_for_ranks=False, seconds=120.2)
LOADER = Answer("for a batch of its loader", "train.py:60", waits_for_ranks=False, seconds=3.0)


def backward(seconds: float) -> Answer:
    return Answer("in `all_reduce`", "`on_step` (train.py:44)", waits_for_ranks=True, seconds=seconds)


def test_ranks_that_others_wait_for_come_first_and_equal_answers_are_one_group() -> None:
    answers = {0: backward(118.0), 1: STEP, 2: backward(118.3), 3: backward(119.0), 5: LOADER}

    assert summarize(answers, world_size=7) == (
        "Rank 1 has been in `training_step` (train.py:41) for 120 s; "
        "rank 5 has waited 3 s for a batch of its loader (train.py:60); "
        "ranks 0, 2, 3 have waited 118 to 119 s in `all_reduce` (`on_step`, train.py:44); "
        "ranks 4, 6 have not answered."
    )


def test_consecutive_ranks_are_shortened() -> None:
    answers = {rank: STEP for rank in range(100) if rank != 7}

    assert summarize(answers, world_size=100) == (
        "Ranks 0 to 6, 8 to 99 have been in `training_step` (train.py:41) for 120 s; rank 7 has not answered."
    )


def test_answer_is_the_same_after_the_store() -> None:
    assert Answer.from_text(STEP.as_text()) == STEP
