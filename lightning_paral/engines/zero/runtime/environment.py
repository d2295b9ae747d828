"""Variables of the environment that DeepSpeed reads, set for a while."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def variables_as_before(names: Iterable[str]) -> Iterator[None]:
    """Give the environment's variables `names` their old values when the context ends."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
