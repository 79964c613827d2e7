"""The only reader of a job's events, and the state of the run in them: data only, for all that shows a run.

It may import wording and errors only. The events: docs/design/events.md
"""
