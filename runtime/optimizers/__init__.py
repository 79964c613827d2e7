"""Update formulas over flat arrays, for the engine's shards and for the optimizers of `dslaunch.ops` alike.

They know the kernels, not ZeRO.
"""
