"""What the note of a rank's error shows."""

import json

import pytest
import yaml

from lightning_paral.distributed.launching.rank_main import _user_lines


def test_traceback_shows_a_library_of_the_user_and_not_that_of_python() -> None:
    with pytest.raises(yaml.YAMLError) as of_library:
        yaml.safe_load("[")
    with pytest.raises(json.JSONDecodeError) as of_python:
        json.loads("[")

    assert "yaml/__init__.py" in "".join(_user_lines(of_library.value))
    shown = "".join(_user_lines(of_python.value))
    assert 'json.loads("[")' in shown
    assert "json/decoder.py" not in shown
