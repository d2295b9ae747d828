"""Which layers of a module tensor parallelism splits, and which collectives between them can be left out."""
