"""The formats of a checkpoint on disk, each with its writer and its reader."""
