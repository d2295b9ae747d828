"""Plots of measured results as SVG, drawn with matplotlib, which the extra `docs` installs.

Whether a plot is up to date can be seen without matplotlib: the file contains its data.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

INK, FAINT, COLOR, PAPER = "#1f2430", "#d5d9e2", "#3949ab", "#ffffff"
WIDTH, ROW_HEIGHT, MARGIN = 5.6, 0.27, 0.85
"""In inches. The width is that of a phone in landscape, so that the text can be read on narrow pages."""
STYLE = {
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor"), PAPER),  # not transparent: the pages have a dark theme
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "axes.edgecolor": FAINT,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so files are the same everywhere
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "xtick.labelsize": 8,
    "svg.hashsalt": "lightning_paral",  # equal IDs in every run
}


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Values on one axis, a row for each."""

    title: str
    rows: Sequence[tuple[str, float, str]]
    """Name, value, and the text next to the value."""
    limits: tuple[float, float]
    """Ends of the axis."""
    reference: float
    """Where a vertical line is drawn."""
    reference_label: str
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class Plot:
    """Panels below each other."""

    panels: Sequence[Panel]

    @property
    def data(self) -> str:
        """What the plot shows, in words; the file contains it."""
        return "; ".join(
            f"{panel.title}: " + ", ".join(f"{name} {value:.3g} ({text})" for name, value, text in panel.rows)
            for panel in self.panels
        )

    def is_up_to_date(self, path: Path) -> bool:
        """Return whether the file at `path` shows this data."""
        found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text()) if path.exists() else None
        return found is not None and unescape(found[1]) == self.data

    def render(self) -> str:
        """Return the SVG.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        import matplotlib as mpl
        from matplotlib.figure import Figure  # not pyplot, which keeps figures and looks for a display

        heights = [MARGIN + ROW_HEIGHT * len(panel.rows) for panel in self.panels]
        with mpl.rc_context(STYLE):
            figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
            figure.get_layout_engine().set(w_pad=0.1, h_pad=0.12, hspace=0.08)  # type: ignore[union-attr, call-arg]
            axes = figure.subplots(len(self.panels), squeeze=False, height_ratios=heights)[:, 0]
            for panel, axis in zip(self.panels, axes, strict=True):
                _draw(panel, axis)
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Description": self.data})
        return re.sub(r" +$", "", file.getvalue(), flags=re.MULTILINE)


def _draw(panel: Panel, axis: Any) -> None:
    names, values, texts = zip(*panel.rows, strict=True)
    positions = range(len(names))
    if panel.log:
        axis.set_xscale("log")
    axis.set_xlim(panel.limits)
    axis.set_ylim(len(names) - 0.4, -0.6)
    axis.hlines(positions, panel.limits[0], values, color=COLOR, linewidth=2)
    axis.scatter(values, positions, s=36, color=COLOR, zorder=3)
    axis.axvline(panel.reference, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    for position, value, text in zip(positions, values, texts, strict=True):
        label = axis.annotate(text, (value, position), xytext=(8, 0), textcoords="offset points", va="center")
        label.set_bbox({"facecolor": PAPER, "edgecolor": "none", "pad": 1})
    axis.set_title(panel.title, pad=8)
    axis.set_yticks(positions, names)
    axis.set_xlabel(panel.reference_label)
    axis.tick_params(which="both", length=0)
    axis.grid(axis="x", color=FAINT, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
