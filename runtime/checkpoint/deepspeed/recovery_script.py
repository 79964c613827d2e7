"""zero_to_fp32.py and zero_to_torch.py, which users of DeepSpeed look for beside `latest`."""

from __future__ import annotations

from ..storage.folder_store import FolderStore
from ..storage.store import Store

_TEXT = '''#!/usr/bin/env python3
"""Write the weights of a checkpoint in this folder, in {what},
as files that transformers and torch.load read.

    python {name}.py . OUTPUT_DIR{words}              the newest checkpoint, as pytorch_model.bin
    python {name}.py . OUTPUT_DIR{words} -t TAG       another one; --help shows more

dslaunch, which wrote the checkpoints, has to be installed.
"""

try:
    from dslaunch.utils.{name} import main
except ImportError as error:
    advice = "install what wrote the checkpoint: pip install '.[train]' in a clone of dslaunch"
    raise SystemExit(f"{name}.py: {{error}}; {{advice}}")

if __name__ == "__main__":
    main()
'''
SCRIPTS = {
    "zero_to_fp32.py": _TEXT.format(name="zero_to_fp32", what="float32", words="").encode(),
    "zero_to_torch.py": _TEXT.format(
        name="zero_to_torch", what="the dtype that is named", words=" --dtype bfloat16"
    ).encode(),
}


def put_scripts(store: Store) -> None:
    """Put the scripts into the folder.

    Errors: OSError
    """
    for name, text in SCRIPTS.items():
        if store.size(name) == len(text):
            continue
        store.put(name, text)
        if isinstance(store, FolderStore):
            path = store.root / name
            mode = path.stat().st_mode
            path.chmod(mode | (mode & 0o444) >> 2)  # every reader may run it
