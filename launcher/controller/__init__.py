"""Drives the agents of one job: links, roster, phases, master address, signals.

It may import backends, output and what stands below them.
"""
