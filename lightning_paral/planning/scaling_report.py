"""Show how the predicted time of each strategy changes with the number of ranks."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from lightning_paral.planning.time.world_sizes import ScalingRow
from lightning_paral.quantities import format_seconds
from lightning_paral.tables import make_table


def scaling_as_table(rows: Sequence[ScalingRow]) -> RenderableType:
    """Return the time of a step, and the samples or tokens per second of all ranks, by strategy and number of ranks.

    What does not fit is in parentheses. Strategies whose time is unknown at every number of ranks are left out.
    """
    known = {row.layout.name for row in rows if row.seconds is not None and (row.world_size > 1 or _is_single(rows))}
    names = [name for name in dict.fromkeys(row.layout.name for row in rows) if name in known]
    sizes = list(dict.fromkeys(row.world_size for row in rows))
    by_key = {(row.layout.name, row.world_size): row for row in rows}
    unit = "tokens" if any(row.tokens_per_second for row in rows) else "samples"
    cells = [[name, *(_cell(by_key[name, size]) for size in sizes)] for name in names]
    parts: list[RenderableType] = []
    for first in range(0, len(sizes), _COLUMNS):
        shown = sizes[first : first + _COLUMNS]
        headers = ["strategy", *(f"{size:,}" for size in shown)]
        parts.append(
            make_table(headers, [[row[0], *row[1 + first : 1 + first + len(shown)]] for row in cells], is_narrow=True)
        )
    legend = f"By the number of ranks, each with the same batch: predicted time of a step, and {unit}/s of all ranks."
    if any(row.fits is False for row in rows):
        legend += " In parentheses: does not fit into the memory of the device."
    return Group(*parts, Text(legend, style="dim"))


_COLUMNS = 5


def _is_single(rows: Sequence[ScalingRow]) -> bool:
    return all(row.world_size == 1 for row in rows)


def _cell(row: ScalingRow) -> str:
    if row.seconds is None:
        return ""
    per_second = row.tokens_per_second or row.samples_per_second
    text = format_seconds(row.seconds)
    if per_second is not None:
        text += f", {_short(per_second)}/s"
    return f"[dim]({text})[/]" if row.fits is False else text


def _short(value: float) -> str:
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"
