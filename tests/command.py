"""Run the command `paral` in a test."""

import sys
from typing import Any
from unittest.mock import patch

from lightning_paral.cli import main


def run_paral(*arguments: str) -> Any:
    """Run `paral` in this process, and return what it exits with: a message, a status, or `None`."""
    with patch.object(sys, "argv", ["paral", *arguments]):
        try:
            main()
        except SystemExit as ended:
            return ended.code
    return None
