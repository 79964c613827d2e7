"""What the real DeepSpeed makes of command lines: `python deepspeed_oracle.py FOLDER <
cases.json > answers.json`.

FOLDER holds the deepspeed package. Its launcher/runner.py runs as it is, from the words to the command that
it would start; only its imports of the training side are replaced (they need torch and a compiler, and have
no part in this), the number of devices, and the start itself. A case is {"words", "num_devices", "visible"};
an answer is the hosts with their device ids, [["w0", [0, 1]], ...], or the text of the error.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import io
import json
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class Accelerator:
    """A machine with some devices."""

    num_devices = 0

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def device_count(self) -> int:
        return self.num_devices

    def export_envs(self) -> list[str]:
        return []


class Started:
    """A process that ended well at once; its words are kept."""

    words: tuple[str, ...] = ()
    returncode = 0

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        Started.words = tuple(words)

    def wait(self) -> int:
        return 0


def load_runner(folder: Path) -> Any:
    """deepspeed.launcher.runner of the package in `folder`."""
    package = ModuleType("deepspeed")
    package.__path__ = [str(folder / "deepspeed")]
    stands_in: dict[str, dict[str, object]] = {
        "deepspeed.utils": {
            "logger": logging.getLogger("deepspeed"),
            "set_log_level_from_string": lambda level: None,
            "get_numactl_cmd": None,
        },
        "deepspeed.autotuning": {"Autotuner": None},
        "deepspeed.accelerator": {"get_accelerator": Accelerator},
    }
    sys.modules["deepspeed"] = package
    for name, values in stands_in.items():
        module = ModuleType(name)
        vars(module).update(values)
        sys.modules[name] = module
    logging.disable()
    return importlib.import_module("deepspeed.launcher.runner")


def answer(runner: Any, case: dict[str, Any]) -> object:
    """What one command line would start, or how it is refused."""
    Accelerator.num_devices = case["num_devices"]
    Started.words = ()
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if case["visible"] is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = case["visible"]
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            # This node only, and a given address: no SSH on the way. What is left out does not depend on it.
            runner.main(["--no_ssh", "--node_rank=0", "--master_addr=127.0.0.1", *case["words"]])
    except (Exception, SystemExit) as error:  # any error is an answer; which one is not compared
        return f"{type(error).__name__}: {error}"
    prefix = "--world_info="
    encoded = next(word for word in Started.words if word.startswith(prefix)).removeprefix(prefix)
    return list(json.loads(base64.urlsafe_b64decode(encoded)).items())


def main() -> None:
    runner = load_runner(Path(sys.argv[1]))
    runner.subprocess.Popen = Started
    json.dump([answer(runner, case) for case in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
