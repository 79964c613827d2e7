"""Sequences divided over ranks: attention by all-to-all (Ulysses), their loss, their batches, and compute in
tiles.

It may import mesh and what stands below it.
"""
