"""The files of a checkpoint: what stands in each, and where."""
