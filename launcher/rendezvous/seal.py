"""A code in each frame, which shows that it comes from the other side, unchanged, once, and in its turn.

A proof at the beginning alone would leave the rest of a connection to any attacker on the path. So where the
nodes share a token, each frame after the handshake has a code in front that is made with a key of this
connection and direction, of the number of the frame, and of its bytes.
"""

from __future__ import annotations

import hmac

from ..wire.frames import ProtocolError

CODE_BYTES = 16


class Seal:
    """One direction of one connection. Both sides make one with the same key, and count alike."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def close(self, body: bytes) -> bytes:
        """Return the body with its code in front."""
        return self._code(body) + body

    def open(self, sealed: bytes) -> bytes:
        """Return the body. Errors: ProtocolError if it is not the frame that the other side sent next"""
        code, body = sealed[:CODE_BYTES], sealed[CODE_BYTES:]
        if not hmac.compare_digest(code, self._code(body)):
            raise ProtocolError("a frame that the other side did not send, or not now; who is on the way?")
        return body

    def _code(self, body: bytes) -> bytes:
        number = self._number.to_bytes(8, "big")
        self._number += 1
        return hmac.digest(self._key, number + body, "sha256")[:CODE_BYTES]
