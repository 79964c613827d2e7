"""Samples for training: which rank gets which, and where a loader is.

It may import errors.
"""
