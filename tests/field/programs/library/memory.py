"""Memory that a program takes for an action."""

import re
import threading
from pathlib import Path

KB_PER_MB = 1024


def own_mb() -> float:
    """Return the memory of this process that is no file's."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / KB_PER_MB


def peak_while(action) -> float:
    """Return by how many MB this process grows at most while the action runs."""
    before, sizes, is_over = own_mb(), [own_mb()], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.001):
            sizes.append(own_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    is_over.set()
    watcher.join()
    return max(sizes) - before
