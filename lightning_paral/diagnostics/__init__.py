"""`paral check` and `paral doctor`: prove equality on a project, and look at a machine."""
