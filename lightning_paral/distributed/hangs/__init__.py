"""Say where all ranks are when they wait for each other too long."""
