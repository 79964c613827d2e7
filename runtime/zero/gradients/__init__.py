"""Gradients of one sub-buffer: replicated, sharded, or on a disk."""
