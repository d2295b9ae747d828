"""What `ParalMonitor` consists of: clocks, phases of a step, the exchange between ranks, values and tables."""
