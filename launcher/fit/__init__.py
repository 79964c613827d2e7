"""Judgement of whether a job fits on its hosts: each kind of rank is rehearsed here, and its bytes are held
against memory.

A rehearsal is the runtime's `python -m dslaunch.runtime.plan`, in a process of its own.
"""
