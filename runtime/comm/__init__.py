"""Process groups, the mesh of ranks, and the collectives that the units use.

It may import config and what stands below it.
"""
