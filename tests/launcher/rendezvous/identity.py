"""The identity of a job of three nodes that all tests of the rendezvous share."""

from __future__ import annotations

from dataclasses import replace

from dslaunch.launcher.rendezvous.messages import JobIdentity

IDENTITY = JobIdentity(
    job_id="",
    token="",
    names=("a", "b", "c"),
    ranks=((0, 1), (2, 3), (4, 5)),
    hosts="3 hosts",
    hosts_digest="h",
    program_digest="p",
)
PROVEN = replace(
    IDENTITY, token="s3cret"
)  # the same job, whose nodes prove to each other that they know the token
