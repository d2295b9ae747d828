"""Plots of measured results, as SVG: dots on one axis, a row per name."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

ROW, LEFT, WIDTH, TOP, RIGHT = 26, 210, 820, 74, 130
INK, FAINT, DOT, PAPER = "#1f2430", "#c9ced8", "#3949ab", "#ffffff"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Dots on one axis."""

    title: str
    subtitle: str
    rows: Sequence[tuple[str, float, str]]
    """Name, value, and the value in words."""
    ticks: Sequence[tuple[float, str]]
    marked: float
    """Where a vertical line is drawn."""
    marked_as: str
    scale: Callable[[float], float] = float
    """What is linear in the width: the identity, or a logarithm."""

    def render(self) -> str:
        """Return the SVG."""
        first, last = self.scale(self.ticks[0][0]), self.scale(self.ticks[-1][0])

        def x_of(value: float) -> float:
            part = (self.scale(value) - first) / (last - first)
            return LEFT + min(1.0, max(0.0, part)) * (WIDTH - LEFT - RIGHT)

        bottom = TOP + ROW * len(self.rows)
        height = bottom + 52
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
            f'font-family="system-ui, -apple-system, Segoe UI, DejaVu Sans, sans-serif" font-size="13" fill="{INK}">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>',
            f'<text x="20" y="30" font-size="17" font-weight="600">{escape(self.title)}</text>',
            f'<text x="20" y="51" opacity="0.75">{escape(self.subtitle)}</text>',
        ]
        for value, label in self.ticks:
            lines += [
                f'<line x1="{x_of(value):.1f}" x2="{x_of(value):.1f}" y1="{TOP}" y2="{bottom}" stroke="{FAINT}"/>',
                f'<text x="{x_of(value):.1f}" y="{bottom + 18}" text-anchor="middle" opacity="0.75">{label}</text>',
            ]
        at = x_of(self.marked)
        lines += [
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}" stroke="{INK}" stroke-dasharray="4 3"/>',
            f'<text x="{at:.1f}" y="{bottom + 38}" text-anchor="middle">{escape(self.marked_as)}</text>',
        ]
        for number, (name, value, words) in enumerate(self.rows):
            y, x = TOP + ROW * (number + 0.5), x_of(value)
            lines += [
                f'<text x="20" y="{y + 4:.1f}" font-family="ui-monospace, DejaVu Sans Mono, monospace">{name}</text>',
                f'<line x1="{LEFT}" x2="{x:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{DOT}" stroke-width="2"/>',
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{DOT}"/>',
                f'<text x="{x + 11:.1f}" y="{y + 4:.1f}" stroke="{PAPER}" stroke-width="4" paint-order="stroke">'
                f"{escape(words)}</text>",
            ]
        return "\n".join([*lines, "</svg>"]) + "\n"


def log10(value: float) -> float:
    """Return the decimal logarithm; what is smaller than 1e-9 counts as that."""
    return math.log10(max(value, 1e-9))
