"""Output for the user and for files: console, status line, log files, report.

It may import job and what stands below it.
"""
