"""The kernels' machine code, read by nvdisasm: no pack of elements waits for some of its loads before it has
asked for all of them.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dslaunch.kernels.cuda import lamb, norm
from dslaunch.kernels.cuda.compiler import Nvrtc, Program
from dslaunch.kernels.cuda.shards import GRAD_DTYPES, PARAM_OUT_DTYPES
from dslaunch.kernels.cuda.table import SMALL, Variant
from tests.exhaustive import few
from tests.kernels.cuda.rules import ALL_DTYPES, FEW_DTYPES, RULES, USUAL_DTYPES, programs

ARCHS = ("sm_80", "sm_90", "sm_100")  # CUDA 13's nvdisasm knows nothing older than sm_75
ACCESSES = {"float32": 2, "bfloat16": 1, "float16": 1, None: 0}  # of 16 bytes, for a pack of 8 elements
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?([A-Z][\w.]*) *(.*?) ;")
# `LDG.E.128 R20, desc[UR6][R38.64]`, and on sm_80 `LDG.E.128 R20, [R38.64]`
LOADED = re.compile(r"R(\d+),")

Code = list[tuple[str, str]]  # opcodes, each with its operands
Disassemble = Callable[[Program, str], dict[str, Code]]


@pytest.fixture(scope="module")
def disassemble(tmp_path_factory: pytest.TempPathFactory) -> Disassemble:
    """Compile a program for a chip, and return the code of each of its kernels."""
    pathfinder = pytest.importorskip("cuda.pathfinder")
    nvdisasm = pathfinder.find_nvidia_binary_utility("nvdisasm")
    if nvdisasm is None:
        pytest.skip(
            "nvdisasm is in the package nvidia-cuda-nvdisasm, which the group dev of pyproject.toml has"
        )
    file = tmp_path_factory.mktemp("machine-code") / "cubin"

    def of_program(program: Program, arch: str) -> dict[str, Code]:
        file.write_bytes(Nvrtc().compile(program, arch))
        return code_of(nvdisasm, file)

    return of_program


def code_of(nvdisasm: str, file: Path) -> dict[str, Code]:
    done = subprocess.run([nvdisasm, "-c", file], capture_output=True, text=True, check=True)
    sections = re.split(r"^\.text\.(\w+):$", done.stdout, flags=re.MULTILINE)
    return {
        name: INSTRUCTION.findall(text) for name, text in zip(sections[1::2], sections[2::2], strict=True)
    }


def early_uses(code: Code) -> list[str]:
    """What asks for a loaded value, or may branch, before a pack's last load."""
    loads = [at for at, (opcode, _) in enumerate(code) if opcode.startswith("LDG.") and ".128" in opcode]
    loaded: set[str] = set()
    early = []
    for at, (opcode, operands) in enumerate(code[loads[0] : loads[-1] + 1], loads[0]):
        used = set(re.findall(r"\bR\d+\b", operands))
        if at in loads:
            match = LOADED.match(operands)
            assert match is not None, operands
            first = int(match[1])
            used.discard(f"R{first}")
            loaded_here = {f"R{first + word}" for word in range(4)}
        else:
            loaded_here = set()
        if used & loaded or opcode.split(".")[0] in {"MUFU", "BRA", "CALL"}:
            early.append(f"{opcode} {operands}")
        loaded |= loaded_here
    return early


def assert_reads_well(code: Code, *, loads: int, stores: int) -> None:
    opcodes = [opcode for opcode, _ in code]
    assert not [opcode for opcode in opcodes if opcode.split(".")[0] in {"LDL", "STL", "LD", "ST"}]
    assert sum(opcode.startswith("LDG.") and ".128" in opcode for opcode in opcodes) == loads
    assert sum(opcode.startswith("STG.") and ".128" in opcode for opcode in opcodes) == stores
    assert early_uses(code) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "mode", "arch", "every_dtype"),
    [
        *((source, modes[-1], "sm_90", (USUAL_DTYPES,)) for source, (_, modes) in RULES.items()),
        *(
            pytest.param(source, mode, arch, dtypes, marks=pytest.mark.exhaustive)
            for source, (_, modes) in RULES.items()
            for mode in modes
            for arch in ARCHS
            for dtypes in [ALL_DTYPES if (source, arch) == ("adam", "sm_80") else FEW_DTYPES]
        ),
    ],
    ids=lambda value: f"{len(value)} dtypes" if type(value) is tuple else None,
)
def test_a_step_asks_for_all_of_a_pack_before_it_uses_any_of_it(
    disassemble: Disassemble,
    source: str,
    mode: int,
    arch: str,
    every_dtype: tuple[tuple[str, str, str | None], ...],
) -> None:
    rule, _ = RULES[source]
    for dtypes in every_dtype:
        grad, state, out = dtypes
        (program,) = programs(rule, mode, (dtypes,))
        states = ACCESSES[state] * len(rule.kernel.states) * (source != "sgd" or mode != 0)
        if source == "lamb":  # the direction instead of a new parameter
            stores = states + ACCESSES["float32"]
        else:
            stores = ACCESSES["float32"] + states + ACCESSES[out]
        code = disassemble(program, arch)["lamb_directions" if source == "lamb" else "optimizer_step"]
        assert_reads_well(code, loads=ACCESSES[grad] + ACCESSES["float32"] + states, stores=stores)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("out", "arch"),
    few(
        [(out, arch) for out in (None, *PARAM_OUT_DTYPES) for arch in ARCHS],
        lambda out, arch: (out, arch) == ("bfloat16", "sm_90"),
    ),
)
def test_lambs_second_pass_does_too(disassemble: Disassemble, out: str | None, arch: str) -> None:
    code = disassemble(lamb.apply_program(out, SMALL), arch)["lamb_apply"]
    assert_reads_well(code, loads=2 * ACCESSES["float32"], stores=ACCESSES["float32"] + ACCESSES[out])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grad", "arch"),
    few(
        [(grad, arch) for grad in GRAD_DTYPES for arch in ARCHS],
        lambda grad, arch: (grad, arch) == ("bfloat16", "sm_90"),
    ),
)
def test_the_norm_does_too(disassemble: Disassemble, grad: str, arch: str) -> None:
    code = disassemble(norm.program_of(Variant(grad=grad)), arch)["norm_add"]
    assert_reads_well(code, loads=ACCESSES[grad], stores=0)
