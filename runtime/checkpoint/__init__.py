"""Checkpoints that any ZeRO stage and any number of ranks can read."""
