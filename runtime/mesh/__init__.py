"""Meshes: the axes of a job, and the domains of a model, whose ranks share parameters.

It may import comm and what stands below it.
"""
