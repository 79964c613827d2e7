"""One rank that loads a folder of weights, with the tool that its command line names.

    python benchmarks/loading_worker.py TOOL FOLDER

It says when it is ready, loads when it is told so, and answers with the seconds and the memory that took.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

READY = "ready"
ONE_PROCESS, EACH_RANK, OURS = "from_pretrained()", "from_pretrained() on each rank", "load_weights()"
_LOOK_S = 0.005
_MB = 1e6


class Loaded(NamedTuple):
    """Time and memory of a rank."""

    seconds: float
    peak_mb: float  # memory of its own, beyond what the process had before
    kept_mb: float  # so much of it was left when all was done


class _Peak(threading.Thread):
    """Looks at this process's own memory all the time; pages of files, which others share, do not count."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = own_mb()
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            self.peak = max(self.peak, own_mb())
            time.sleep(_LOOK_S)


def own_mb() -> float:
    """Return the memory of this process that is no part of a file."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(found) * 1024 / _MB


def load(tool: str, folder: str) -> Any:
    """Return a model with the weights of the folder, whole or this rank's part."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import dslaunch

    if tool == OURS:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder)
    if tool == ONE_PROCESS:  # its values are in files until they are read
        return {name: param.detach().clone() for name, param in model.named_parameters()}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine, *_ = dslaunch.initialize(model=model, config=config)
    if tool == OURS:
        engine.load_weights(folder)
    return engine


def _main(tool: str, folder: str) -> None:
    import torch
    import torch.distributed as dist
    import transformers

    import dslaunch

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(folder)
    # imports, which take seconds
    _ = getattr(transformers, config.architectures[0]), dslaunch.initialize
    if tool != ONE_PROCESS:
        dist.init_process_group("gloo")
    sys.stdin.readline()
    print(READY, flush=True)
    sys.stdin.readline()
    peak = _Peak()
    peak.start()
    began = time.perf_counter()
    kept = load(tool, folder)
    seconds = time.perf_counter() - began
    peak.is_over = True
    loaded = Loaded(seconds, max(peak.peak, own_mb()) - peak.before, own_mb() - peak.before)
    print(json.dumps(loaded), flush=True)
    sys.stdin.readline()
    del kept


if __name__ == "__main__":
    _main(*sys.argv[1:])
