"""One optimizer step over shards: rules, schedules, loss scale, gradient norm.

It may import zero and what stands below it.
"""
