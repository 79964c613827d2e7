"""Ways to get one byte stream to an agent on a host, and the agent's way onto it.

It may import job and what stands below it.
"""
