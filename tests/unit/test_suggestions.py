"""Names that resemble a misspelled one are suggested, the most similar first."""

from lightning_paral.suggestions import did_you_mean, nearest_names


def test_nearest_names_come_first_and_are_limited() -> None:
    known = {"learning_rate", "learning_rates", "bucket", "rate"}

    assert nearest_names("learnin_rate", known) == ["learning_rate", "learning_rates"]
    assert nearest_names("learnin_rate", known, most=1) == ["learning_rate"]
    assert nearest_names("unrelated", known) == []
    assert nearest_names("rates", known, cutoff=0.99) == []


def test_question_lists_the_names_and_is_empty_without() -> None:
    assert did_you_mean(["a", "b"]) == "Did you mean a or b?"
    assert did_you_mean(["a"], quoted=True) == "Did you mean 'a'?"
    assert did_you_mean([]) == ""
