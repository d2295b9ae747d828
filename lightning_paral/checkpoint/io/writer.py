"""Writing a file from its beginning to its end, with checksums taken on the way."""

from contextlib import nullcontext
from types import TracebackType
from typing import Any, BinaryIO

from lightning_paral.checkpoint.io.checksums import BlockChecksums, FileRecord
from lightning_paral.checkpoint.io.writeback import BackgroundFsync


class ChecksummedWriter:
    """A new file that is written from its beginning to its end; flushed to the disk when closed without an error."""

    def __init__(self, file: BinaryIO, *, on_disk: bool) -> None:
        self._file = file
        self._flushing = BackgroundFsync(file.fileno()) if on_disk else None  # an upload lasts when it is closed
        self._checksums = BlockChecksums()
        self.error: OSError | None = None
        """What the last write failed of: `torch.save` raises an error of its own in its place."""

    @property
    def position(self) -> int:
        """Number of bytes written."""
        return self._checksums.position

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
            if self._flushing is not None:
                self._flushing.wrote(len(view))
        except OSError as error:
            self.error = error
            raise
        self._checksums.update(view)
        return len(view)

    def pad(self, alignment: int) -> None:
        """Append zeros until the position is a multiple of `alignment`."""
        self.write(bytes(-self.position % alignment))

    def flush(self) -> None:
        """Nothing: it is flushed when it is closed."""

    def record(self) -> FileRecord:
        """Return size and checksums of what was written."""
        return self._checksums.record()

    def __enter__(self) -> "ChecksummedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file, self._flushing or nullcontext():
            if error is None:
                self._file.flush()
                if self._flushing is not None:
                    self._flushing.finish()
            elif self.error is not None:
                raise self.error
