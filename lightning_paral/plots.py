"""matplotlib, which is an optional dependency."""

from pathlib import Path
from typing import Any

from lightning_paral.errors import ConfigurationError


def import_pyplot() -> Any:
    """Return `matplotlib.pyplot`, set to draw into files.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigurationError(
            "Plots need matplotlib, which is not installed. Run `pip install 'lightning_paral[plot]'`."
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_plot_path(path: str) -> None:
    """Check that a plot can be written to a file, before what is to be drawn is measured.

    Raises:
        ConfigurationError: matplotlib is not installed, the ending names no format, or the folder does not exist.
    """
    figure = import_pyplot().figure()
    _check_format(figure, path)
    if not Path(path).absolute().parent.is_dir():
        raise ConfigurationError(f"--plot {path!r}: there is no folder {str(Path(path).parent)!r}. Create it first.")


def _check_format(figure: Any, path: str) -> None:
    formats = figure.canvas.get_supported_filetypes()
    if Path(path).suffix.lstrip(".") not in formats:
        raise ConfigurationError(
            f"--plot {path!r}: the ending names no format. Use one of {', '.join(sorted(formats))}."
        )


def save_figure(figure: Any, path: str) -> None:
    """Write a figure to a file whose ending names the format, such as `.png` or `.svg`.

    Raises:
        ConfigurationError: the ending names no format, or the file cannot be written.
    """
    _check_format(figure, path)
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except OSError as error:
        raise ConfigurationError(f"--plot {path!r}: the file cannot be written: {error}.") from error
