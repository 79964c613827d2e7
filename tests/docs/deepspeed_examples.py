"""A worker that runs several scripts one after the other: `... deepspeed_examples.py SCRIPT WORD...
++ SCRIPT WORD...`

Each gets `--local_rank` as from a launcher, and says on rank 0 that it begins.
Torch and transformers are imported once.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys

BEGIN = "== "
NEXT = "++"


def main() -> None:
    scripts: list[list[str]] = [[]]
    for word in sys.argv[1:]:
        if word == NEXT:
            scripts.append([])
        else:
            scripts[-1].append(word)
    for number, (path, *words) in enumerate(scripts):
        if os.environ["RANK"] == "0":
            print(f"{BEGIN}{number}", flush=True)
        sys.argv = [path, f"--local_rank={os.environ['LOCAL_RANK']}", *words]
        runpy.run_path(path, run_name="__main__")
        gc.collect()


if __name__ == "__main__":
    main()
