"""The names of dslaunch and of dslaunch.utils, and where they are loaded from."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import tomllib

import dslaunch
from dslaunch.launcher.command_line import runtime_program
from dslaunch.runtime import log
from dslaunch.runtime.compat import comm, on_device
from dslaunch.runtime.compat.accelerator import current


def test_every_name_is_there_once_it_is_asked_for() -> None:
    for module in (dslaunch, dslaunch.utils, dslaunch.ops):
        assert dir(module) == module.__all__ == sorted(module.__all__)
        for name in module.__all__:
            assert getattr(module, name) is not None, name
        with pytest.raises(AttributeError, match="has no attribute 'other'; it has "):
            _ = module.other


def test_what_stands_beside_the_engine_is_one_thing_by_all_its_names() -> None:
    assert dslaunch.comm is comm
    assert dslaunch.get_accelerator is current.get_accelerator
    assert dslaunch.OnDevice is dslaunch.utils.OnDevice is on_device.OnDevice
    assert dslaunch.utils.logger is log.logger
    assert dslaunch.utils.set_z3_leaf_modules is dslaunch.zero.set_z3_leaf_modules


@pytest.mark.parametrize("name", sorted(dslaunch._MODULE_OF))
def test_a_module_is_imported_by_its_name_as_well_as_from_the_package(name: str) -> None:
    assert import_module(f"dslaunch.{name}") is getattr(dslaunch, name)
    assert sys.modules[f"dslaunch.{name}"] is getattr(dslaunch, name)


def test_a_package_that_training_needs_and_is_not_installed_is_named() -> None:
    program = "import sys; sys.modules['torch'] = None; import dslaunch; dslaunch.initialize"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr.splitlines()[-1] == (
        "ImportError: dslaunch.initialize needs the package torch, which is not installed; install what "
        "training needs with: pip install '.[train]' in a clone of dslaunch"
    )


def test_what_training_needs_is_what_the_package_says() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    named = [re.split("[><=]", one)[0] for one in project["optional-dependencies"]["train"]]
    assert list(dslaunch._NEEDED) == list(runtime_program.NEEDED) == named


ASKS_FOR_NO_GPU = """
import importlib, sys, torch
def asked(*given, **named):
    raise AssertionError("asks for GPUs while it is imported, and no process can be forked any more")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = asked
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_no_module_asks_for_gpus_while_it_is_imported() -> None:
    runtime = Path(dslaunch.runtime.__path__[0])
    names = [
        ".".join(("dslaunch.runtime", *path.relative_to(runtime).with_suffix("").parts))
        for path in sorted(runtime.rglob("*.py"))
        if not path.name.startswith("__")
    ]
    subprocess.run([sys.executable, "-c", ASKS_FOR_NO_GPU, *names], check=True)
