"""A ProxyCommand: a program whose stdin and stdout lead to a host's sshd."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile

END_WITHIN_S = 1.0  # after the end of its connection; then the program is killed
ERROR_TEXT_BYTES = 4096
NOT_RUN = (126, 127)  # exit statuses with which a shell reports that there is no such program


class Proxy:
    """The running program. `sock` is our end: a real socket, so no byte has to be passed on."""

    def __init__(self, command: str) -> None:
        """Run the command as ssh does, by the user's shell; a terminal's Ctrl-C does not reach it.

        Errors: OSError if there is no such shell
        """
        self.command = command
        self.sock, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the program
        try:
            self._process = subprocess.Popen(
                [os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                start_new_session=True,
            )
        except BaseException:
            self.sock.close()
            self._errors.close()
            raise
        finally:
            theirs.close()

    def why_ended(self) -> tuple[int, str] | None:
        """Return the program's exit status, 128 + n after signal n, and the end of its stderr; None if it
        still runs.
        """
        try:
            status = self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            return None
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - ERROR_TEXT_BYTES))
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return (status if status >= 0 else 128 - status), lines[-1].strip() if lines else ""

    def close(self) -> None:
        """End the program with its descendants, and close its files."""
        self.sock.close()
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            # The kernel keeps a killed process as long as a file system that it uses hangs.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_WITHIN_S)
        self._errors.close()
