"""What is shipped: the version, the files of the wheel, and that a wheel works alone, without torch."""

from __future__ import annotations

import email
import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import dslaunch
from dslaunch import drop_in
from tests.docs.test_links import relative_links
from tests.exhaustive import few
from tests.lab import Lab

ROOT = Path(__file__).parents[1]
FOLDERS = {
    ("package/dslaunch"): ("dslaunch"),
    ("launcher"): ("dslaunch/launcher"),
    ("runtime"): ("dslaunch/runtime"),
    ("kernels"): ("dslaunch/kernels"),
}
NOT_PACKED = {".so", ".pyc"}
NOT_SHIPPED = {".cpp", *NOT_PACKED}
CPU_HEADERS = ("kernels/cpu/", "kernels/bindings/")  # compiled into the module; the others are for NVRTC
LINKS = {"package/dslaunch/launcher", "package/dslaunch/runtime", "package/dslaunch/kernels"}


def test_the_installed_version_is_the_one_in_the_source() -> None:
    assert importlib.metadata.version("dslaunch") == dslaunch.__version__


def expected_files() -> set[str]:
    """Return what the wheel holds beside its metadata and the compiled module."""
    expected = set()
    for folder, place in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            inside = path.relative_to(ROOT / folder)
            if f"{folder}/{inside.parts[0]}" in LINKS or not path.is_file():
                continue
            if path.suffix == ".h" and f"{folder}/{inside}".startswith(CPU_HEADERS):
                continue
            if path.suffix not in NOT_SHIPPED and path.name != "CMakeLists.txt":
                expected.add(f"{place}/{inside}")
    return expected


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, and a wheel from this checkout, in a folder of its own.

    Not from the source distribution, which would be compiled anew: what was compiled to install this
    one is used again.
    """
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", f"--outdir={folder}"]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    return folder


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_wheel_holds_every_module_and_no_source_of_the_compiled_one(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert archive.getinfo("dslaunch/drop_in/bin/deepspeed").external_attr >> 16 & 0o111 == 0o111
    compiled = [name for name in names if name.endswith(".so")]
    assert len(compiled) == 1
    assert compiled[0].startswith("dslaunch/kernels/_C.")
    assert len(names) == len(set(names))
    assert set(names) - set(compiled) == expected_files() | {"dslaunch_drop_in.pth"}
    assert "dslaunch/py.typed" in names
    assert f"dslaunch/drop_in/path/deepspeed-{drop_in.VERSION}.egg-info/PKG-INFO" in names
    assert {
        "dslaunch/kernels/adam.h",
        "dslaunch/kernels/cuda/adam.cu",
        "dslaunch/kernels/cuda/step.cuh",
    } <= set(names)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_extra_is_a_feature_and_not_what_only_the_tests_need(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    extras = {line.split()[1] for line in metadata.splitlines() if line.startswith("Provides-Extra:")}
    assert extras == {"train", "cuda12", "cuda13", "demo", "watch", "report", "prometheus", "otel"}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_package_index_shows_the_readme_without_a_link_that_is_relative(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    (sdist,) = built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = archive.read(name).decode()
    with tarfile.open(sdist) as archive:
        packed = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert packed is not None
        assert packed.read().decode() == metadata
    shown = email.message_from_string(metadata)
    assert shown["Description-Content-Type"] == "text/markdown"
    assert str(shown.get_payload()).startswith("# dslaunch\n")
    assert relative_links(str(shown.get_payload())) == []
    assert "pip install 'dslaunch[train]'" in str(shown.get_payload())


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_source_distribution_holds_all_that_the_wheel_is_made_of_and_each_folder_once(
    built: Path,
) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in NOT_PACKED
    }
    assert {name for name in names if name.startswith(tuple(f"{folder}/" for folder in FOLDERS))} == sources
    assert {"kernels/CMakeLists.txt", "kernels/bindings/module.cpp", "pyproject.toml", "LICENSE"} <= names
    assert not {name for name in names if any(name == link or name.startswith(f"{link}/") for link in LINKS)}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_unpacked_wheel_works_alone_and_loads_no_torch(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        "import array, sys; sys.path.insert(0, sys.argv[1])\n"
        "import dslaunch, dslaunch.launcher, dslaunch.kernels as kernels\n"
        "assert kernels.squared_norm([array.array('f', [3.0, 4.0])]) == 25.0\n"
        "assert 'torch' not in sys.modules\n"
        "print(dslaunch.__version__, kernels.__file__)\n"
    )
    # -I -S: neither this checkout nor what is installed can be found.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script, str(tmp_path)],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == [dslaunch.__version__, str(tmp_path / "dslaunch/kernels/__init__.py")]


def installed_into(folder: Path, wheel: Path) -> Path:
    """The Python of a new environment in this folder into which the wheel was installed.

    What dslaunch depends on is taken from the environment of the tests, where no `.pth` file is read.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", f"--python={python}", "install", "-q"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(wheel)], check=True)
    (packages,) = (folder / "lib").glob("python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return python


@pytest.fixture
def plain(built: Path, tmp_path: Path) -> Path:
    """The Python of an environment into which dslaunch was installed by
    `pip install '.[train]'`, not editable.
    """
    (wheel,) = built.glob("*.whl")
    return installed_into(tmp_path / "venv", wheel)


def wheel_without_compiler(built: Path, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """What pip does with the source distribution where CMake finds no compiler that works."""
    (sdist,) = built.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-index", "--no-deps"]
    return subprocess.run(
        [*pip, "--no-build-isolation", "--no-cache-dir", "--verbose", f"--wheel-dir={folder}", str(sdist)],
        env={**os.environ, "CC": "/bin/false", "CXX": "/bin/false", **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def pure(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is made where nothing can be compiled."""
    folder = tmp_path_factory.mktemp("pure")
    done = wheel_without_compiler(built, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "the kernels could not be compiled; this installation has a launcher only"
        in done.stdout + done.stderr
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_where_nothing_can_be_compiled_the_wheel_is_for_every_python_and_has_all_but_the_compiled_module(
    pure: Path,
) -> None:
    assert pure.name == f"dslaunch-{dslaunch.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(pure) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected_files() | {"dslaunch_drop_in.pth"}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_of_the_launcher_alone_compiles_nothing(built: Path, tmp_path: Path) -> None:
    done = wheel_without_compiler(built, tmp_path, DSLAUNCH_LAUNCHER_ONLY="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CMake" not in done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"dslaunch-{dslaunch.__version__}-py3-none-any.whl"


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_for_others_is_not_made_without_the_compiled_module(built: Path, tmp_path: Path) -> None:
    done = wheel_without_compiler(built, tmp_path, DSLAUNCH_REQUIRE_KERNELS="1")
    assert done.returncode != 0
    assert "CMake configuration failed" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


WORKER = "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
USE = """
import dslaunch, dslaunch.kernels as kernels
try:
    kernels.squared_norm([])
except ImportError as error:
    print(error)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_was_installed_without_a_compiler_launches_here_and_on_hosts_and_says_what_is_missing_at_use(
    pure: Path, lab: Lab
) -> None:
    folder = lab.shared / "pure"
    python = installed_into(folder, pure)
    (lab.shared / "worker.py").write_text(WORKER)
    command = str(python.with_name("dslaunch"))
    try:
        asked = lab.head.run([command, "--version"])
        assert asked.stdout == f"dslaunch {dslaunch.__version__}\n", asked.stderr
        here = lab.head.run([command, "--num_gpus=2", "--no_local_rank", str(lab.shared / "worker.py")])
        lines = sorted(here.stdout.splitlines())
        assert lines == ["localhost:0 | rank 0 of 2", "localhost:1 | rank 1 of 2"], here.stderr
        hosts = [command, "-H", str(lab.hostfile), "--no_local_rank", str(lab.shared / "worker.py")]
        there = lab.head.run(hosts, cwd=str(lab.shared))
        num_ranks = 2 * len(lab.nodes)
        assert there.returncode == 0, there.stderr
        wanted = {f"node{rank // 2 + 1}:{rank} | rank {rank} of {num_ranks}" for rank in range(num_ranks)}
        assert set(there.stdout.splitlines()) == wanted
        used = lab.head.run([str(python), "-c", USE])
        assert used.stdout.startswith("this dslaunch was installed without its compiled module"), used.stderr
        assert f"{python} -m pip install --force-reinstall" in used.stdout
        trained = lab.head.run([str(python), "-c", TRAIN])
        assert trained.returncode == 1
        assert "ImportError: this dslaunch was installed without" in trained.stderr
    finally:
        shutil.rmtree(folder)


TRAIN = """
import dslaunch, torch
model = torch.nn.Linear(2, 2)
config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
dslaunch.initialize(model=model, config=config)
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("installed", few(["plain", "editable"], lambda installed: installed == "plain"))
def test_the_first_example_runs_in_a_clone_whether_dslaunch_was_installed_plainly_or_editable(
    installed: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    clone, python = ROOT, Path(sys.executable)
    if installed == "plain":
        clone, python = tmp_path / "clone", request.getfixturevalue("plain")
        shutil.copytree(
            ROOT, clone, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "__pycache__")
        )
    done = subprocess.run(
        [str(python.with_name("dslaunch")), "--num_gpus=2", "docs/examples/check_collectives.py"],
        cwd=clone,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all_reduce" in done.stdout
    asked = subprocess.run(
        [str(python), "-c", "import dslaunch.kernels; print(dslaunch.kernels.__file__)"],
        cwd=clone,
        capture_output=True,
        text=True,
        check=True,
    )
    home = ROOT if installed == "editable" else tmp_path / "venv"
    assert Path(asked.stdout.strip()).is_relative_to(home)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_checkout_on_the_path_is_not_taken_for_hugging_faces_kernels() -> None:
    """An editable installation puts it there, and `transformers` imports an optional package of that name."""
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from transformers import "
        "Qwen2ForCausalLM; import kernels;"
        "from dslaunch.kernels import adamw_step; assert not hasattr(kernels, 'adamw_step')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


TYPO = """
import dslaunch

dslaunch.initialize
dslaunch.zero.Init
dslaunch.initialise()
"""
# The facade's own names are what is looked at: to check all that lies behind them takes mypy half a minute,
# and `make check` does that.
ONLY_THE_FACADE = """
[mypy-torch.*,dslaunch.runtime.*,dslaunch.launcher.*,dslaunch.kernels.*]
follow_imports = skip
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checker", "message"),
    [
        (["-m", "mypy", "--config-file=mypy.ini"], 'Module has no attribute "initialise"'),
        (["-m", "basedpyright", "--level", "error"], '"initialise" is not a known attribute'),
    ],
)
def test_a_misspelt_public_name_is_an_error_to_type_checkers(
    tmp_path: Path, checker: list[str], message: str
) -> None:
    (tmp_path / "train.py").write_text(TYPO)
    (tmp_path / "mypy.ini").write_text(f"[mypy]{ONLY_THE_FACADE}")
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT}/package"]}}')
    done = subprocess.run(
        [sys.executable, *checker, "train.py"] if "mypy" in checker else [sys.executable, *checker],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": f"{ROOT}/package"},
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if "error:" in line or "error " in line]
    assert done.returncode == 1
    assert message in said[0], done.stdout
    assert all("1 error" in line for line in said[1:]), done.stdout
