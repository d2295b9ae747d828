"""Report the error of a rank to torchrun."""

import os
from contextlib import suppress

from torch.distributed.elastic.multiprocessing.errors import get_error_handler


def tell_torchrun(error: BaseException | None) -> None:
    """Write an `Exception` to the file from which torchrun reads it, to show its traceback in the summary; once."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and isinstance(error, Exception) and not os.path.exists(path):
        trace = error.__traceback__
        try:
            raise error  # `record_exception` formats the exception that is being handled
        except Exception:
            with suppress(OSError):
                get_error_handler().record_exception(error.with_traceback(trace))
