"""Agents on many hosts without a job: check, exec, probe.

It may import controller and what stands below it.
"""
