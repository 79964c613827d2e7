"""What is said where there is no compiled module, or one that cannot be loaded. Each in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "kernels"


@pytest.mark.slow
@pytest.mark.parametrize(
    "use", ["squared_norm([])", "ADAM.step([])", "disk.DiskEngine()", "compiled.require_compiled()"]
)
def test_a_missing_compiled_module_is_told_at_its_first_use_and_how_to_build_it(use: str) -> None:
    script = (
        "import sys; sys.modules['dslaunch.kernels._C'] = None\n"
        "import dslaunch.kernels as kernels, dslaunch.kernels.disk\n"
        f"print('imported'); kernels.{use}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n"
    assert "ImportError: this dslaunch was installed without its compiled module" in done.stderr
    assert "`make setup`" in done.stderr


@pytest.mark.slow
def test_a_compiled_module_that_cannot_be_loaded_is_told_apart_from_one_that_is_missing(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "dslaunch"
    for name in ("__init__.py", "compiled.py", "norm.py", "shard.py"):
        path = folder / "kernels" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((KERNELS / name).read_text() if name != "__init__.py" else "")
    (folder / "__init__.py").touch()
    (folder / "kernels" / "_C.abi3.so").write_bytes(b"no library")
    script = "from dslaunch.kernels.compiled import require_compiled; require_compiled()"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the compiled module dslaunch.kernels._C cannot be loaded (" in done.stderr
    assert "libgomp" in done.stderr
