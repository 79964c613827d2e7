"""The facts about a job while it runs, as one stream of events, and the sinks of these.

It may import job, options, node, wire and what stands below them.
"""
