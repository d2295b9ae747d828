"""Having the disk write while the rest of a file is still being made."""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

_EVERY_BYTES = 128 * 2**20
_flush_data = getattr(os, "fdatasync", os.fsync)  # macOS has fsync only


class BackgroundFsync:
    """Flushes an open file in the background as it grows, so that little is left to wait for at its end.

    By itself Linux begins to write when a tenth of the memory is waiting for the disk, which then has stood idle.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flush")
        self._under_way: Future[None] | None = None
        self._waiting_bytes = 0

    def wrote(self, nbytes: int) -> None:
        """Note that the file has grown.

        Raises:
            OSError: flushing failed before. It is told to the one who asks first, and not again by a later flush.
        """
        self._waiting_bytes += nbytes
        if self._waiting_bytes >= _EVERY_BYTES and (self._under_way is None or self._under_way.done()):
            self._check()
            self._under_way = self._thread.submit(_flush_data, self._descriptor)
            self._waiting_bytes = 0

    def finish(self) -> None:
        """Flush all of it.

        Raises:
            OSError: this or an earlier flush failed.
        """
        self._check()
        os.fsync(self._descriptor)

    def _check(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def __enter__(self) -> "BackgroundFsync":
        return self

    def __exit__(self, *_: Any) -> None:
        self._thread.shutdown()
