"""Costs of a training: throughput, monitors, and a profile of what a model computes.

It may import checkpoint and what stands below it.
"""
