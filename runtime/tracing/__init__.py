"""Traces: the work of a process, by name and time, in the steps that `dslaunch --trace` asks for.

It may import environment and what stands below it.
"""
