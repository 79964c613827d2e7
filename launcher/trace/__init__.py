"""Traces of steps: from what each rank has written to one file, and to where the time went.

It may import output and what stands below it.
"""
