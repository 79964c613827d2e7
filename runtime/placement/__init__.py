"""Places of all values: the stage table, the offload plan, and the dtypes.

Arithmetic only.
"""
