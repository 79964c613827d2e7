"""The events of a job, read, and what they say of the run: data only, for everything that shows a run.

It may import wording and errors only. The events: docs/design/events.md
"""
