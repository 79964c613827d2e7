"""Files that come before a job and leave after it."""

from __future__ import annotations

from ...wire.frames import Chunk, Collect, Frame, SyncFrom, SyncOffer, Took
from ..system.lean_stdlib import Selector
from .mailbox import Mailbox

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .collecting import Collecting
    from .sync_receiver import Receiver


class FileThreads:
    """Hands each frame to the thread that works on it."""

    def __init__(
        self, selector: Selector, send: Callable[[Frame], None], *, own_folder: str | None = None
    ) -> None:
        """`own_folder` is the agent's, if there is one."""
        self._own_folder = own_folder
        self._mailbox = Mailbox(selector, send)
        self._receiver: Receiver | None = None
        self._collecting: Collecting | None = None

    def take(self, frame: Frame) -> None:
        if isinstance(frame, SyncOffer):
            from .sync_receiver import Receiver

            self.end_sync()
            self._receiver = Receiver(frame, self._mailbox.post)
        elif isinstance(frame, Collect):
            from .collecting import Collecting

            self._collecting = Collecting(frame, self._mailbox.post, own_folder=self._own_folder)
        elif isinstance(frame, Took):
            if self._collecting is not None:
                self._collecting.grant(frame.num_bytes)
        elif self._receiver is not None:
            if isinstance(frame, Chunk):
                self._receiver.take(frame.data)
            elif isinstance(frame, SyncFrom):
                self._receiver.take(frame)

    def end_sync(self) -> None:
        """End the sync: the job starts, or is given up, and no other host needs files of this one."""
        if self._receiver is not None:
            self._receiver.end()
