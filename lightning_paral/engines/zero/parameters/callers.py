"""Who asks for a parameter's values: the engine, which knows what lies there, or code of the user's."""

import sys
from types import FrameType

_ENGINE = ("deepspeed", "lightning_paral")


def is_users(depth: int = 2) -> bool:
    """Whether the function `depth` calls up, past functions of torch's, is neither DeepSpeed's nor ours.

    Lightning counts as the user's: what it does with parameters, its callbacks do, for the user.
    """
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package != "torch":
            return package not in _ENGINE
        frame = frame.f_back
    return True
