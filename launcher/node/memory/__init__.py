"""Snapshots of a training in the memory of agents: they outlive the workers."""
