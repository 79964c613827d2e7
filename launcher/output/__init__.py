"""What a person sees and what is kept: console, status line, log files, report.

It may import job and what stands below it.
"""
