"""Activation checkpointing: what a forward keeps for the backward, and what it computes again.

It may import zero and what stands below it.
"""
