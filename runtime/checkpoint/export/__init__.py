"""Whole weights for other programs, a tensor in memory at a time."""
