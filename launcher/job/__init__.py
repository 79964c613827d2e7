"""A job as data: plan, restart, gateways, verdict.

Arithmetic only; it may import options and what stands below it.
"""
