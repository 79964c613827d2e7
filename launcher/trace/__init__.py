"""Traces of steps: from each rank's files to one file, and to where the time went.

It may import output and what stands below it.
"""
