"""What is known of a job while it runs, as one stream of events, and where they go.

It may import job, options, node, wire and what stands below them.
"""
