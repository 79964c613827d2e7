"""Samples for training: which rank gets which samples, and the position of a loader in them.

It may import errors.
"""
