"""Two streams of a rank: what it computes, and what it sends."""


class Streams:
    """The times at which a rank is done with what it computes, and with what it sends; both begin at 0.

    Collectives run one after another. What they overlap with depends on what waits for them.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds after which the rank has computed everything so far."""
        self._sent = 0.0

    def compute(self, seconds: float) -> None:
        """Compute for so long."""
        self.now += seconds

    def start(self, seconds: float, earliest: float | None = None) -> float:
        """Start a collective and return when it ends.

        Args:
            seconds: how long it takes.
            earliest: when it can start, if the collectives before have ended; `None` for now.
        """
        self._sent = max(self._sent, self.now if earliest is None else earliest) + seconds
        return self._sent

    def wait(self, end: float) -> None:
        """Compute nothing until `end`."""
        self.now = max(self.now, end)

    def run(self, seconds: float) -> None:
        """Start a collective and wait for it."""
        self.wait(self.start(seconds))
