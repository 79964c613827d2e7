"""Optimizer states in host memory or on a local disk, while parameters are on the device that computes."""
