"""One thing that the doctor looked at: what it found, whether that is good, and what to do otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "note", "warning", "broken"]
"""`note`: not there, and nothing needs it. `warning`: some strategy lacks it, or it may fail. `broken`: repair it."""


@dataclass(frozen=True, kw_only=True)
class Fact:
    """What was found about one part of a machine or of its software."""

    name: str
    found: str
    """What was found, in a few words."""
    state: State = "ok"
    advice: str = ""
    """What to do: a command, or a sentence. Empty if nothing has to be done."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The numbers and paths behind `found`, for JSON. Sizes are in bytes, and speeds in bytes per second."""

    @property
    def is_ok(self) -> bool:
        """Whether it was found and works."""
        return self.state == "ok"
