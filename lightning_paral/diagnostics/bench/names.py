"""Check the names that the options of a benchmark list."""

from collections.abc import Collection, Sequence

from lightning_paral.errors import ConfigurationError
from lightning_paral.suggestions import did_you_mean, nearest_names


def check_names(option: str, names: Sequence[str], known: Collection[str]) -> None:
    """Check that all `names` are known.

    Raises:
        ConfigurationError: one is not. The message has the names that resemble it.
    """
    for name in names:
        if name not in known:
            near = nearest_names(name, known, cutoff=0.6)
            hint = did_you_mean(near, quoted=True) if near else f"The names are {', '.join(known)}."
            raise ConfigurationError(f"{option}: there is no {name!r}. {hint}")
