"""Many real hosts on one Linux machine: own network, processes, home folder, sshd.

`python -m tests.lab --help`.

Files, each importing only those before it:
place -> procfs, cgroup, network, lock -> ssh -> machine -> host -> lab -> __main__ (the command line).
"""

from .host import Host
from .lab import Lab
from .machine import Process
from .place import LabError

__all__ = ["Host", "Lab", "LabError", "Process"]
