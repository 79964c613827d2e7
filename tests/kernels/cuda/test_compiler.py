"""Every kernel is compiled by NVRTC for every chip, without one being there; and what is compiled is kept."""

from __future__ import annotations

import gc
import io
import itertools
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dslaunch.kernels.cuda import CudaUnavailable, lamb, norm
from dslaunch.kernels.cuda.compiler import SOURCES, CubinCache, Nvrtc, Program, cache_folder
from dslaunch.kernels.cuda.shards import GRAD_DTYPES, PARAM_OUT_DTYPES
from dslaunch.kernels.cuda.table import LARGE, SMALL, Variant
from tests.exhaustive import few
from tests.kernels.cuda.rules import ALL_DTYPES, FEW_DTYPES, RULES, USUAL_DTYPES, programs

ARCHS = ("sm_70", "sm_80", "sm_90", "sm_100")
MAX_REGISTERS = (
    96  # 256 threads each: two blocks fit in the 65536 registers of a processor, with much to spare
)


KERNELS = {"lamb": {"lamb_directions", "lamb_step_sizes"}}
USAGE = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
    r"(\d+) bytes spill loads"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


def assert_compiles_well(program: Program, arch: str, kernels: set[str]) -> None:
    if arch == "sm_70" and not Nvrtc().version().startswith("nvrtc 12."):
        pytest.skip("CUDA 13's compiler begins at sm_75")
    cubin, log = Nvrtc().compile_with_log(program, arch)
    assert cubin.startswith(b"\x7fELF")
    usage = {name: [int(number) for number in numbers] for name, *numbers in USAGE.findall(log)}
    assert set(usage) == kernels
    for name, (stack, stores, loads, registers) in usage.items():
        assert (stack, stores, loads) == (0, 0, 0), (program, arch, name)
        assert registers <= MAX_REGISTERS, (program, arch, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "mode", "arch"),
    few(
        [(source, mode, arch) for source, (_, modes) in RULES.items() for mode in modes for arch in ARCHS],
        lambda source, mode, arch: arch == "sm_80" if mode else (source, arch) == ("lamb", "sm_100"),
    ),
)
def test_every_step_compiles_for_every_chip_and_spills_nothing(source: str, mode: int, arch: str) -> None:
    """All combinations of dtypes for the one that is used most, a few for the others."""
    rule, _ = RULES[source]
    is_usual = (source, mode, arch) == ("adam", 1, "sm_90")
    for program in programs(rule, mode, ALL_DTYPES if is_usual else FEW_DTYPES):
        assert_compiles_well(program, arch, KERNELS.get(source, {"optimizer_step"}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("out", "arch"),
    few(
        itertools.product([None, *PARAM_OUT_DTYPES], ARCHS),
        lambda out, arch: (out, arch) in ((None, "sm_70"), ("bfloat16", "sm_80")),
    ),
)
def test_lambs_second_pass_compiles_for_every_chip_and_spills_nothing(out: str | None, arch: str) -> None:
    for size in (SMALL, LARGE):
        assert_compiles_well(lamb.apply_program(out, size), arch, {"lamb_apply"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "arch"), few(itertools.product(RULES, ARCHS), lambda source, arch: arch == "sm_90")
)
def test_the_large_table_compiles_too(source: str, arch: str) -> None:
    rule, modes = RULES[source]
    (program,) = programs(rule, modes[-1], (USUAL_DTYPES,), LARGE)
    assert_compiles_well(program, arch, KERNELS.get(source, {"optimizer_step"}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grad", "arch"),
    few(itertools.product(GRAD_DTYPES, ARCHS), lambda grad, arch: arch == "sm_70" or grad == "bfloat16"),
)
def test_the_norm_compiles_for_every_chip_and_spills_nothing(grad: str, arch: str) -> None:
    program = norm.program_of(Variant(grad=grad))
    assert_compiles_well(program, arch, {"norm_begin", "norm_add", "norm_end"})


@pytest.mark.slow
def test_a_spill_would_be_seen() -> None:
    """A kernel that needs 64 values at once and may have 32 registers:
    what the tests above look for is really there.
    """
    from cuda.core import Program as CoreProgram, ProgramOptions

    source = """
        extern "C" __global__ void __launch_bounds__(1024, 2) crowded(const float* from, float* to) {
            float value[64];
            #pragma unroll
            for (int i = 0; i < 64; ++i) value[i] = from[i * 1024 + threadIdx.x];
            __syncthreads();
            #pragma unroll
            for (int i = 0; i < 64; ++i) to[i * 1024 + threadIdx.x] = value[63 - i] * value[(i * 7) % 64];
        }
    """
    log = io.StringIO()
    CoreProgram(source, "c++", ProgramOptions(arch="sm_80", ptxas_options="-v")).compile("cubin", logs=log)
    ((name, _, stores, _, _),) = USAGE.findall(log.getvalue())
    assert name == "crowded"
    assert int(stores) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("grad", "state", "out"), FEW_DTYPES)
def test_aligned_elements_move_16_bytes_at_a_time(grad: str, state: str, out: str | None) -> None:
    """8 elements in each array are an access for each 16 bytes, and no other vectors;
    nothing else is moved together.
    """
    (program,) = programs(RULES["adam"][0], 1, ((grad, state, out),))
    ptx = ptx_of(program)
    accesses = {"float32": 2, "bfloat16": 1, "float16": 1, None: 0}
    assert len(re.findall(r"ld\.global\.v4\.[ubf]32", ptx)) == accesses[grad] + 2 + 2 * accesses[state]
    assert len(re.findall(r"st\.global\.v4\.[ubf]32", ptx)) == 2 + 2 * accesses[state] + accesses[out]
    assert not re.findall(r"(?:ld|st)\.global\.v2", ptx)
    assert "fma.rn.f32" not in ptx  # the bits of the CPU's kernel: no fused multiply-add


def ptx_of(program: Program) -> str:
    """cuda.core asks a driver before it gives PTX out; NVRTC itself does not."""
    from cuda.bindings import nvrtc

    source = (SOURCES / f"{program.source}.cu").read_bytes()
    _, handle = nvrtc.nvrtcCreateProgram(source, f"{program.source}.cu".encode(), 0, [], [])
    options = ["--gpu-architecture=compute_80", "--std=c++17", "--fmad=false", f"--include-path={SOURCES}"]
    options += [f"--define-macro={name}={value}" for name, value in program.macros]
    (status,) = nvrtc.nvrtcCompileProgram(handle, len(options), [option.encode() for option in options])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, size = nvrtc.nvrtcGetPTXSize(handle)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(handle, ptx)
    nvrtc.nvrtcDestroyProgram(handle)
    return ptx.decode()


# ---- what cannot be compiled -----------------------------------------------------------------------------


def test_a_chip_that_the_compiler_does_not_know_is_named() -> None:
    with pytest.raises(
        CudaUnavailable, match=r"^norm.cu: nvrtc 1\d\.\d cannot compile it for sm_20; .* pip install"
    ):
        Nvrtc().compile(norm.program_of(Variant(grad="float32")), "sm_20")


def test_a_program_that_cannot_be_compiled_is_not_left_to_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuda-core's dislike that, and print a traceback that the user can do nothing about."""
    printed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    try:
        Nvrtc().compile(norm.program_of(Variant(grad="float32")), "sm_20")
    except CudaUnavailable as error:
        error.__notes__ = [error]  # type: ignore[list-item]  # a cycle, as programs make one that keep an error
    gc.collect()
    assert printed == []


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["cuda.bindings", "cuda.core", "cuda"])
def test_without_cuda_core_one_error_names_the_command(missing: str) -> None:
    script = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from dslaunch.kernels.cuda import CudaUnavailable, norm\n"
        "from dslaunch.kernels.cuda.compiler import CubinCache, Nvrtc\n"
        "from dslaunch.kernels.cuda.device import cuda_device\n"
        "from dslaunch.kernels.cuda.table import Variant\n"
        "for call in (lambda: Nvrtc().compile(norm.program_of(Variant(grad='float32')), 'sm_80'), "
        "lambda: cuda_device(0)):\n"
        "    try: call()\n"
        "    except CudaUnavailable as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    compiler, device = done.stdout.splitlines()
    for line in (compiler, device):
        assert "python -m pip install '.[cuda12]' (torch for CUDA 12) or '.[cuda13]'" in line
    assert compiler.startswith("NVIDIA's run-time compiler cannot be loaded (")
    assert device.startswith("CUDA device 0 cannot be used through cuda-core (")


@pytest.mark.slow
def test_the_import_loads_neither_torch_nor_cuda() -> None:
    script = (
        "import sys, dslaunch.kernels.cuda; print(sorted({'torch', 'numpy', 'cuda.core', 'cuda.bindings'} "
        "& set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---- the cache -------------------------------------------------------------------------------------------


class Counting:
    """A compiler that says what it was asked for."""

    def __init__(self, release: str = "1.0") -> None:
        self.release = release
        self.calls: list[tuple[Program, str]] = []

    def version(self) -> str:
        return self.release

    def compile(self, program: Program, arch: str) -> bytes:
        self.calls.append((program, arch))
        return f"{program} for {arch} by {self.release}".encode()


ADAM = Program(source="adam", macros=(("DSLAUNCH_GRAD", "float"),))
OTHERS = [
    (Program(source="adam", macros=(("DSLAUNCH_GRAD", "bfloat16"),)), "sm_80", "1.0"),
    (Program(source="norm", macros=ADAM.macros), "sm_80", "1.0"),
    (ADAM, "sm_90", "1.0"),
    (ADAM, "sm_80", "1.1"),
]


def test_a_program_is_compiled_once_for_all_processes(tmp_path: Path) -> None:
    compiler, later = Counting(), Counting()
    first = CubinCache(tmp_path / "not" / "there", compiler).load(ADAM, "sm_80")
    second = CubinCache(tmp_path / "not" / "there", later).load(ADAM, "sm_80")
    assert first == second == f"{ADAM} for sm_80 by 1.0".encode()
    assert (len(compiler.calls), later.calls) == (1, [])


@pytest.mark.parametrize(("program", "arch", "release"), OTHERS)
def test_another_program_chip_or_compiler_is_another_file(
    tmp_path: Path, program: Program, arch: str, release: str
) -> None:
    CubinCache(tmp_path, Counting()).load(ADAM, "sm_80")
    compiler = Counting(release)
    cubin = CubinCache(tmp_path, compiler).load(program, arch)
    assert cubin == f"{program} for {arch} by {release}".encode()
    assert compiler.calls == [(program, arch)]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("changed", ["adam.cu", "runs.cuh", "../adam.h", "../bfloat16.h"])
def test_a_changed_source_or_header_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    sources = tmp_path / "kernels" / "cuda"
    sources.mkdir(parents=True)
    for path in SOURCES.glob("*.cu*"):
        shutil.copy(path, sources)
    for path in SOURCES.parent.glob("*.h"):
        shutil.copy(path, sources.parent)
    monkeypatch.setattr("dslaunch.kernels.cuda.compiler.SOURCES", sources)
    compiler = Counting()
    cache = CubinCache(tmp_path / "cache", compiler)
    cache.load(ADAM, "sm_80")
    cache.load(ADAM, "sm_80")
    assert len(compiler.calls) == 1
    with (sources / changed).open("a") as file:
        file.write("// changed\n")
    cache.load(ADAM, "sm_80")
    assert len(compiler.calls) == 2


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_broken_file_is_compiled_again_and_replaced(tmp_path: Path, damage: bytes | None) -> None:
    cache = CubinCache(tmp_path, Counting())
    good = cache.load(ADAM, "sm_80")
    path = cache.path(ADAM, "sm_80")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?" if damage is None else damage)
    compiler = Counting()
    assert CubinCache(tmp_path, compiler).load(ADAM, "sm_80") == good
    assert len(compiler.calls) == 1
    assert path.read_bytes() == whole
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_a_folder_that_cannot_be_written_is_said_and_the_code_is_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = CubinCache(tmp_path / "file" / "cache", Counting())
    with pytest.warns(RuntimeWarning, match=r"cannot be kept there .*; set DSLAUNCH_CACHE_DIR"):
        assert cache.load(ADAM, "sm_80") == f"{ADAM} for sm_80 by 1.0".encode()


def test_threads_that_start_together_all_get_the_whole_code(tmp_path: Path) -> None:
    compiler = Counting()
    with ThreadPoolExecutor(8) as pool:
        cubins = list(pool.map(lambda _: CubinCache(tmp_path, compiler).load(ADAM, "sm_80"), range(64)))
    assert set(cubins) == {f"{ADAM} for sm_80 by 1.0".encode()}
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_processes_that_start_together_all_get_the_same_code(tmp_path: Path) -> None:
    script = (
        "import hashlib, sys; from pathlib import Path\n"
        "from dslaunch.kernels.cuda import norm\n"
        "from dslaunch.kernels.cuda.compiler import CubinCache, Nvrtc\n"
        "from dslaunch.kernels.cuda.table import Variant\n"
        "sys.stdin.readline()\n"
        "cubin = CubinCache(Path(sys.argv[1]), "
        "Nvrtc()).load(norm.program_of(Variant(grad='float32')), 'sm_90')\n"
        "print(hashlib.sha256(cubin).hexdigest())\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    digests = set()
    for child in children:  # all are started; now they go
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    for child in children:
        digests.add(child.communicate(timeout=60)[0])
        assert child.returncode == 0
    assert len(digests) == 1
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"HOME": "/home/me"}, "/home/me/.cache/dslaunch/kernels"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/fast"}, "/fast/dslaunch/kernels"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "relative"}, "/home/me/.cache/dslaunch/kernels"),
        ({"HOME": "/home/me", "XDG_CACHE_HOME": "/fast", "DSLAUNCH_CACHE_DIR": "/own"}, "/own/kernels"),
        ({"HOME": "/home/me", "DSLAUNCH_CACHE_DIR": ""}, "/home/me/.cache/dslaunch/kernels"),
    ],
)
def test_the_cache_is_where_the_environment_says(environment: dict[str, str], folder: str) -> None:
    assert cache_folder(environment) == Path(folder)
