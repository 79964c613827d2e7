"""The files of a checkpoint, and their formats."""
