"""Where a lab keeps its things: names and paths, nothing that acts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

BASE = Path("/var/lib/dslaunch-lab")  # not below /tmp, /run or /root: every host has its own of those
NETNS_FOLDER = Path("/run/netns")  # fixed by iproute2
MAX_HOSTS = 400  # with more, the neighbour tables that all network namespaces share overflow


class LabError(Exception):
    """The lab cannot do what was asked: what was given, what is allowed, what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The paths and names of one lab. Labs with different names have nothing in common."""

    name: str = "lab"

    def __post_init__(self) -> None:
        # A dot would let the namespaces of one lab pass for those of another.
        if not re.fullmatch(r"[a-z0-9_-]{1,40}", self.name):
            raise LabError(f"lab name {self.name!r}: must be of a-z 0-9 _ -, at most 40; write e.g. 'lab'")

    @property
    def root(self) -> Path:
        return BASE / self.name

    @property
    def lock(self) -> Path:
        return BASE / f"{self.name}.lock"

    @property
    def state(self) -> Path:
        return self.root / "state.json"

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    @property
    def paths(self) -> Path:
        """A text file of `ro|rw path` lines: what stays visible in every host."""
        return self.root / "paths"

    @property
    def switch(self) -> str:
        """The network namespace that holds the bridge."""
        return self.netns("switch")

    def host_folder(self, host: str) -> Path:
        return self.root / "hosts" / host

    def netns(self, host: str) -> str:
        return f"dslab.{self.name}.{host}"

    def netns_file(self, host: str) -> Path:
        return NETNS_FOLDER / self.netns(host)

    def netns_left(self) -> tuple[str, ...]:
        """Network namespaces of this lab that exist now, whichever process made them."""
        if not NETNS_FOLDER.is_dir():
            return ()
        return tuple(sorted(file.name for file in NETNS_FOLDER.glob(f"dslab.{self.name}.*")))


def host_names(num_hosts: int) -> tuple[str, ...]:
    """The head, where people type, and `num_hosts` nodes."""
    return ("head", *(f"node{i}" for i in range(1, num_hosts + 1)))


def address_of(index: int) -> str:
    """10.77.x.y of the host with this index; the head has index 0."""
    return f"10.77.{index // 200}.{index % 200 + 1}"


def mac_of(index: int) -> str:
    """A fixed hardware address, so that a host that boots again is found by neighbours that remember it."""
    return f"02:4d:00:00:{index // 256:02x}:{index % 256:02x}"
