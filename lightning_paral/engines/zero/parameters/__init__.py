"""Partitioned parameters: their shards, and what user code reads from them and writes to them."""
