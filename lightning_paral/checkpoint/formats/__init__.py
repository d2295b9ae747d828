"""The forms of a checkpoint on disk, each with its writer and its reader."""
