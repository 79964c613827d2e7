"""Files of a disk engine: what is read is what was written, whatever the offset, the length and the
address; and what is said when not.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from dslaunch.kernels.disk import DiskEngine, DiskFile, aligned_empty

BLOCK_BYTES = 8192  # two pages, so that small files have several blocks
FILE_BYTES = 5 * BLOCK_BYTES + 123
TIME_LIMIT_S = 60


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def engine() -> Iterator[DiskEngine]:
    with DiskEngine(num_threads=3, block_bytes=BLOCK_BYTES) as made:
        yield made


def pattern(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def placed(contents: np.ndarray, shift: int) -> np.ndarray:
    """Return a copy `shift` bytes behind a page, so 0 is an address that needs no bounce buffer."""
    memory: np.ndarray = np.from_dlpack(aligned_empty(len(contents) + shift))[shift:]  # type: ignore[arg-type]
    memory[:] = contents
    return memory


def all_of(file: DiskFile) -> bytes:
    read = bytearray(file.nbytes)
    file.read(read).wait()
    return bytes(read)


# ---- what is read is what was written --------------------------------------------------------------------

Write = tuple[int, int, int]  # offset, length, shift of the address
NEAR_PAGES = st.builds(lambda page, off: max(0, page * 4096 + off), st.integers(0, 10), st.integers(-2, 2))
PLACES = st.one_of(NEAR_PAGES, st.integers(0, FILE_BYTES))
SHIFTS = st.sampled_from((0, 1, 64, 512))


@st.composite
def writes(draw: st.DrawFn) -> Write:
    offset = min(draw(PLACES), FILE_BYTES)
    end = draw(st.one_of(st.just(FILE_BYTES), PLACES))
    return offset, max(0, min(end, FILE_BYTES) - offset), draw(SHIFTS)


@pytest.mark.slow
@given(st.lists(writes(), min_size=1, max_size=8))
@settings(max_examples=60)
def test_any_sequence_of_writes_leaves_what_it_leaves_in_a_bytearray(
    tmp_path_factory: pytest.TempPathFactory, sequence: list[Write]
) -> None:
    path = tmp_path_factory.mktemp("model") / "file"
    model = bytearray(FILE_BYTES)
    with DiskEngine(num_threads=3, block_bytes=BLOCK_BYTES) as engine:
        file = engine.create(path, FILE_BYTES)
        for seed, (offset, length, shift) in enumerate(sequence):
            contents = pattern(length, seed)
            file.write(placed(contents, shift), offset).wait()
            model[offset : offset + length] = contents.tobytes()
            read = placed(np.zeros(length, np.uint8), shift)
            file.read(read, offset).wait()
            assert read.tobytes() == contents.tobytes()
        assert all_of(file) == model
    assert path.read_bytes()[:FILE_BYTES] == model


@pytest.mark.slow
@given(st.lists(st.integers(0, FILE_BYTES), min_size=1, max_size=30), SHIFTS)
@settings(max_examples=60)
def test_neighbours_written_at_the_same_time_do_not_touch_each_other(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], shift: int
) -> None:
    contents = pattern(FILE_BYTES, 1)
    edges = sorted({0, FILE_BYTES, *cuts})
    with DiskEngine(num_threads=8, block_bytes=BLOCK_BYTES) as engine:
        file = engine.create(tmp_path_factory.mktemp("cuts") / "file", FILE_BYTES)
        arrays = [placed(contents[a:b], shift) for a, b in itertools.pairwise(edges)]
        requests = [file.write(array, edge) for array, edge in zip(arrays, edges, strict=False)]
        for request in reversed(requests):
            request.wait()
        assert all_of(file) == contents.tobytes()
        read = [placed(np.zeros(b - a, np.uint8), shift) for a, b in itertools.pairwise(edges)]
        for request in [file.read(array, edge) for array, edge in zip(read, edges, strict=False)]:
            request.wait()
        assert b"".join(array.tobytes() for array in read) == contents.tobytes()


def test_several_python_threads_use_one_engine_and_one_file(engine: DiskEngine, folder: Path) -> None:
    file = engine.create(folder / "file", 4 * BLOCK_BYTES)
    failed: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for turn in range(10):
                contents = pattern(BLOCK_BYTES, 10 * index + turn)
                file.write(contents, index * BLOCK_BYTES).wait()
                read = np.empty_like(contents)
                file.read(read, index * BLOCK_BYTES).wait()
                assert np.array_equal(read, contents)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME_LIMIT_S)
    assert not failed
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(
    "array",
    [
        torch.arange(5000, dtype=torch.bfloat16),
        torch.arange(5000).reshape(50, 100),
        np.arange(9999, dtype=np.float32),
        np.array(7.5),
        bytearray(b"abc" * 3000),
        memoryview(bytearray(b"abc" * 3000)),
    ],
    ids=["bfloat16", "two dimensions", "numpy", "no dimension", "bytearray", "memoryview"],
)
def test_arrays_of_every_kind_are_written_and_filled(engine: DiskEngine, folder: Path, array: Any) -> None:
    def in_bytes(of: Any) -> bytes:
        return (
            bytes(of.view(torch.uint8).numpy().tobytes())
            if isinstance(of, torch.Tensor)
            else bytes(memoryview(of))
        )

    before = in_bytes(array)
    with engine.create(folder / "file", len(before)) as file:
        file.write(array).wait()
        file.write(bytes(len(before))).wait()
        file.write(before).wait()
        if isinstance(array, torch.Tensor):
            array.zero_()
        else:
            np.asarray(array)[...] = 0
        file.read(array).wait()
    assert in_bytes(array) == before


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_a_file_is_whole_pages_on_disk_and_counts_its_contents(
    engine: DiskEngine, folder: Path, nbytes: int
) -> None:
    contents = pattern(nbytes, 3)
    with engine.create(folder / "file", nbytes) as file:
        assert file.nbytes == nbytes
        file.write(contents).wait()
    on_disk = (folder / "file").read_bytes()
    assert len(on_disk) == -(-nbytes // 4096) * 4096
    assert on_disk == contents.tobytes() + bytes(len(on_disk) - nbytes)
    with engine.open(folder / "file", nbytes, is_read_only=True) as file:
        assert all_of(file) == contents.tobytes()


def test_a_file_of_others_keeps_its_odd_length(engine: DiskEngine, folder: Path) -> None:
    (folder / "file").write_bytes(bytes(10_000))
    with engine.open(folder / "file") as file:
        file.write(pattern(10_000, 4)).wait()
    assert (folder / "file").read_bytes() == pattern(10_000, 4).tobytes()


# ---- memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4096, (2 << 20) - 1, 2 << 20, (4 << 20) + 1])
def test_aligned_memory_starts_on_a_page_and_exports_both_ways(nbytes: int) -> None:
    memory = aligned_empty(nbytes)
    tensor = torch.from_dlpack(memory)
    assert tensor.shape == (nbytes,)
    assert tensor.dtype == torch.uint8
    assert len(memoryview(memory)) == nbytes  # type: ignore[arg-type]
    if nbytes:
        assert tensor.data_ptr() % (4096 if nbytes < 2 << 20 else 2 << 20) == 0
        del memory
        assert tensor.fill_(7)[-1] == 7  # the view keeps the memory


def test_a_request_keeps_its_array_and_lets_it_go(engine: DiskEngine, folder: Path) -> None:
    file = engine.create(folder / "file", FILE_BYTES)
    array = pattern(FILE_BYTES, 5)
    gone = weakref.ref(array)
    request = file.write(array)
    del array
    request.wait()
    gc.collect()
    assert gone() is None
    assert all_of(file) == pattern(FILE_BYTES, 5).tobytes()


def test_requests_that_nobody_kept_still_arrive(engine: DiskEngine, folder: Path) -> None:
    file = engine.create(folder / "file", 64 * BLOCK_BYTES)
    for index in range(64):
        file.write(pattern(BLOCK_BYTES, index), index * BLOCK_BYTES)
        gc.collect(0)
    file.close()
    want = b"".join(pattern(BLOCK_BYTES, index).tobytes() for index in range(64))
    assert (folder / "file").read_bytes() == want


def test_closing_the_engine_waits_for_what_is_on_its_way(folder: Path) -> None:
    engine = DiskEngine(num_threads=2, block_bytes=4096)
    request = engine.create(folder / "file", 1 << 22).write(pattern(1 << 22, 6))
    engine.close()
    engine.close()
    assert request.done
    request.wait()
    assert (folder / "file").read_bytes() == pattern(1 << 22, 6).tobytes()


@pytest.mark.slow
def test_a_program_that_ends_without_closing_still_writes_all(folder: Path) -> None:
    run_script(
        f"""
        from dslaunch.kernels.disk import DiskEngine
        engine = DiskEngine(num_threads=2, block_bytes=4096)
        file = engine.create({str(folder / "file")!r}, 1 << 24)
        request = file.write(b"x" * (1 << 24))
        """
    )
    assert (folder / "file").read_bytes() == b"x" * (1 << 24)


# ---- what is refused -------------------------------------------------------------------------------------


def read_only_array() -> np.ndarray:
    array = np.zeros(8, np.uint8)
    array.setflags(write=False)
    return array


@pytest.mark.parametrize(
    ("array", "offset", "error", "message"),
    [
        (bytes(8), 0, ValueError, "array: it is read-only, but a read fills it; pass a writable one"),
        (read_only_array(), 0, ValueError,
         "array: it is read-only, but a read fills it; pass a writable one"),
        (np.zeros((4, 4))[:, 1], 0, ValueError,
         "array: its elements do not follow one another; pass a contiguous array"),
        (torch.zeros(8, requires_grad=True), 0, ValueError,
         "array: the tensor requires grad; pass array.detach(), which has the same memory"),
        ([1, 2], 0, TypeError,
         ("array: a list gives no access to its memory through DLPack or the buffer protocol; pass a CPU "
          "torch.Tensor (detached, if it requires grad), a numpy array or a bytearray")),
        (bytearray(8), -1, ValueError, "offset: 8 bytes from -1 on do not fit in the file of 100 bytes"),
        (bytearray(8), 93, ValueError, "offset: 8 bytes from 93 on do not fit in the file of 100 bytes"),
        (bytearray(101), 0, ValueError, "offset: 101 bytes from 0 on do not fit in the file of 100 bytes"),
        (bytearray(0), 101, ValueError, "offset: 0 bytes from 101 on do not fit in the file of 100 bytes"),
    ],
)  # fmt: skip
def test_a_read_that_cannot_be_is_refused_at_once(
    engine: DiskEngine, folder: Path, array: Any, offset: int, error: type[Exception], message: str
) -> None:
    file = engine.create(folder / "file", 100)
    with pytest.raises(error) as caught:
        file.read(array, offset)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_threads": 0}, "num_threads: 0; must be from 1 to 1024"),
        ({"num_threads": 1025}, "num_threads: 1025; must be from 1 to 1024"),
        ({"block_bytes": 2048}, "block_bytes: 2048; must be a power of two from 4096 to 1073741824"),
        ({"block_bytes": 12288}, "block_bytes: 12288; must be a power of two from 4096 to 1073741824"),
    ],
)
def test_an_engine_out_of_range_is_refused(keywords: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match="must be") as caught:
        DiskEngine(**keywords)
    assert str(caught.value) == message


def test_an_existing_file_is_not_made_again(engine: DiskEngine, folder: Path) -> None:
    (folder / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        engine.create(folder / "file", 100)
    assert (folder / "file").read_bytes() == b"mine"


def test_only_a_regular_file_that_is_long_enough_is_opened(engine: DiskEngine, folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    with pytest.raises(ValueError, match="pipe: not a regular file"):
        engine.open(folder / "pipe", is_read_only=True)
    (folder / "short").write_bytes(b"abc")
    with pytest.raises(ValueError, match="short: nbytes 4, but the file has 3"):
        engine.open(folder / "short", 4)
    with pytest.raises(FileNotFoundError):
        engine.open(folder / "none")


def test_closed_files_and_engines_say_so(folder: Path) -> None:
    engine = DiskEngine(num_threads=1)
    file = engine.create(folder / "file", 100)
    file.close()
    with pytest.raises(ValueError, match="file: the file is closed"):
        file.read(bytearray(1))
    engine.close()
    with pytest.raises(ValueError, match="the DiskEngine is closed"):
        engine.create(folder / "other", 100)
    assert not (folder / "other").exists()


# ---- what goes wrong on the way --------------------------------------------------------------------------


def test_a_file_that_was_cut_short_is_said_with_the_byte(engine: DiskEngine, folder: Path) -> None:
    path = folder / "file"
    file = engine.create(path, FILE_BYTES)
    os.truncate(path, 10_000)
    for turn in range(2):
        request = file.read(bytearray(FILE_BYTES - turn), turn)
        with pytest.raises(OSError, match="the file ends there") as caught:
            request.wait()
        assert request.done
        assert caught.value.errno == errno.EIO
        assert caught.value.filename == str(path)
        assert caught.value.strerror == (
            f"the file ends there: reading bytes {turn} to {FILE_BYTES} stopped at byte 10000"
        )


def test_the_byte_is_that_of_the_first_block_that_fails_whichever_thread_comes_first(folder: Path) -> None:
    with DiskEngine(num_threads=4, block_bytes=2 * BLOCK_BYTES) as engine:
        file = engine.create(folder / "file", FILE_BYTES)
        os.truncate(folder / "file", 10_000)
        for _ in range(
            3000
        ):  # of which one in 150 named the next block, when a failure stopped those before it
            with pytest.raises(OSError, match="stopped at byte 10000: "):
                file.read(bytearray(FILE_BYTES), 0).wait()


def test_a_failure_that_nobody_waited_for_is_raised_at_close(engine: DiskEngine, folder: Path) -> None:
    file = engine.open(read_only(folder / "file"), is_read_only=True)
    file.write(bytes(FILE_BYTES))
    file.read(bytearray(FILE_BYTES)).wait()
    with pytest.raises(OSError, match="Bad file descriptor: writing bytes 0 to") as caught:
        file.close()
    assert caught.value.errno == errno.EBADF
    file.close()


def test_a_failure_that_was_told_is_not_told_again_at_close(engine: DiskEngine, folder: Path) -> None:
    file = engine.open(read_only(folder / "file"), is_read_only=True)
    request = file.write(bytes(FILE_BYTES))
    for _ in range(2):
        with pytest.raises(OSError, match="Bad file descriptor"):
            request.wait()
    file.close()


def read_only(path: Path) -> Path:
    path.write_bytes(bytes(FILE_BYTES))
    return path


def run_script(body: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(body)],
        timeout=TIME_LIMIT_S,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.slow
def test_a_forked_child_is_told_and_does_not_hang(folder: Path) -> None:
    script = """
        import gc, os, sys
        from dslaunch.kernels.disk import DiskEngine
        engine = DiskEngine(num_threads=2, block_bytes=4096)
        file = engine.create(FOLDER + "/file", 1 << 22)
        request = file.write(b"x" * (1 << 22))
        child = os.fork()
        if child == 0:
            said = []
            for call in (
                lambda: file.read(bytearray(10)),
                lambda: engine.create(FOLDER + "/other", 100),
                lambda: engine.open(FOLDER + "/file"),
            ):
                try:
                    call()
                except RuntimeError as error:
                    said.append(str(error))
            assert len(said) == 3 and all("make an engine in the child" in text for text in said), said
            file.close()
            engine.close()
            del request, file, engine
            gc.collect()
            with DiskEngine(num_threads=2) as own:
                with own.create(FOLDER + "/own", 100) as made:
                    made.write(b"y" * 100).wait()
            sys.exit(0)  # with the parent's exit handlers
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        request.wait()
        back = bytearray(1 << 22)
        file.read(back).wait()
        assert back == b"x" * (1 << 22)
        """
    run_script(f"FOLDER = {str(folder)!r}\n" + textwrap.dedent(script))
