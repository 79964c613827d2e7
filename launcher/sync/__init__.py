"""Files to the hosts before a job, and back afterwards.

It may import job and what stands below it.
"""
