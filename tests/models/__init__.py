"""Modules that tests train, with their data and how they are fitted: one idea per file."""
