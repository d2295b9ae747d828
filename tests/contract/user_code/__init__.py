"""The table of code that people write in modules and callbacks: the outcome of each row under every strategy."""
