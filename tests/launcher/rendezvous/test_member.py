"""A node that looks for the coordinator."""

from __future__ import annotations

import io
import socket

from dslaunch.launcher.output.console import Console
from dslaunch.launcher.rendezvous.member import Doors, OtherNodes
from tests.launcher.rendezvous.identity import IDENTITY


class Controller:
    """Of a part that nothing is told of."""

    def allow_start(self) -> None:
        raise AssertionError

    def stop(self, failure: object) -> None:
        pass

    def finish(self) -> None:
        pass


def test_the_second_door_is_tried_within_a_short_rendezvous_timeout() -> None:
    member = OtherNodes(
        IDENTITY, 1, console=Console(log_level="info", err=io.BytesIO()), heartbeat_s=9.0, timeout_s=2.0
    )
    with socket.create_server(("127.0.0.1", 0)) as second, socket.socket() as first:
        first.bind(("127.0.0.1", 0))  # nobody listens
        second.settimeout(8.0)
        ports = [one.getsockname()[1] for one in (first, second)]
        member.start(Doors(address="127.0.0.1", port=ports[0], second_port=ports[1]), Controller())
        second.accept()[0].close()
        member.close()
