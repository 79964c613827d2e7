"""Process groups, the mesh of ranks, and the collectives that the units use."""
