"""Storage below ZeRO: copies in host memory, files on a local disk.

It knows no unit; it may import comm, placement and what stands below them.
"""
