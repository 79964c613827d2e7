"""Sequences that are divided over ranks: attention by all-to-all (Ulysses), losses, batches, and computation
in tiles.

It may import mesh and what stands below it.
"""
