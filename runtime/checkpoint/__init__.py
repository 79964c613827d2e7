"""Checkpoints that any ZeRO stage and any number of ranks can read.

It may import step, activation and what stands below them.
"""
