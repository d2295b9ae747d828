"""`python -m lightning_paral ...` and `torchrun ... -m lightning_paral ...` are the command `paral`."""

from lightning_paral.cli import main

main()
