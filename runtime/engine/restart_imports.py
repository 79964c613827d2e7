"""Modules that a program needs soon after a restart, and others load at need: those of checkpoints.

Only the process from which the launcher forks workers of later attempts imports this file:
launcher/node/workers/shared_import.py. They take a second of each worker, most of it torch's own.
"""

from __future__ import annotations

from ..checkpoint import load as load, resume as resume, save as save
