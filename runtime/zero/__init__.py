"""ZeRO as a table: units of flat buffers, and where each of their parts lies.

It may import offload and what stands below it.
"""
