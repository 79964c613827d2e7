"""Places of all values: the stage table, the offload plan, dtypes, and the memory that follows.

Arithmetic only.
"""
