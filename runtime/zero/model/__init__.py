"""A model as units: the collectives over all of them, in one order on all ranks."""
