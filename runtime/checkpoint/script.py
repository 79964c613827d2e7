"""zero_to_fp32.py, which users of DeepSpeed look for beside `latest`."""

from __future__ import annotations

from .folder_store import FolderStore
from .store import Store

SCRIPT = "zero_to_fp32.py"
_TEXT = b'''#!/usr/bin/env python3
"""Write the float32 weights of a checkpoint in this folder as files that transformers and torch.load read.

    python zero_to_fp32.py . OUTPUT_DIR              the newest checkpoint, as pytorch_model.bin
    python zero_to_fp32.py . OUTPUT_DIR -t TAG       another one; --help shows more

dslaunch, which wrote the checkpoints, has to be installed.
"""

try:
    from dslaunch.utils.zero_to_fp32 import main
except ImportError as error:
    raise SystemExit(f"zero_to_fp32.py: {error}; install what wrote the checkpoint: pip install 'dslaunch[train]'")

if __name__ == "__main__":
    main()
'''


def put_script(store: Store) -> None:
    """Have it in the folder.

    Errors: OSError
    """
    if store.size(SCRIPT) == len(_TEXT):
        return
    store.put(SCRIPT, _TEXT)
    if isinstance(store, FolderStore):
        path = store.root / SCRIPT
        mode = path.stat().st_mode
        path.chmod(mode | (mode & 0o444) >> 2)  # who may read it may run it
