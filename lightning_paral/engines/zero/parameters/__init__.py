"""Partitioned parameters: their shards, what users read of them and write to them."""
