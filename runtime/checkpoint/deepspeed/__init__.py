"""Checkpoints that DeepSpeed has written, read."""
