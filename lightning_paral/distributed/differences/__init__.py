"""Notice that ranks differ in settings, parameters or progress."""
