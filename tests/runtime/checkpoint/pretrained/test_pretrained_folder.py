"""Folders of weights: what is read of their files, and what is said of a damaged or foreign one."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dslaunch import CheckpointError
from dslaunch.runtime.checkpoint.pretrained import weight_file
from dslaunch.runtime.checkpoint.pretrained.folder import PretrainedFolder

FILE = "model.safetensors"
INDEX = f"{FILE}.index.json"


def weights() -> dict[str, Tensor]:
    return {
        "a": torch.arange(210.0).view(5, 6, 7),
        "b": torch.arange(6).view(2, 3),
        "c": torch.tensor(2.5, dtype=torch.bfloat16),
        "d": torch.zeros(0, 3),
    }


@pytest.mark.parametrize("format", ["safetensors", "torch"])
@pytest.mark.parametrize("gap_bytes", [0, 64 << 10], ids=["piece by piece", "over the gaps"])
def test_any_box_is_read_in_any_dtype_and_to_any_strides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, gap_bytes: int
) -> None:
    monkeypatch.setattr(weight_file, "_SHORT_BYTES", gap_bytes)
    monkeypatch.setattr(weight_file, "_BLOCK_BYTES", 100)
    written = weights()
    if format == "torch":
        torch.save(written, tmp_path / "pytorch_model.bin")
    else:
        save_file(written, tmp_path / FILE)
    folder = PretrainedFolder(tmp_path)
    found = folder.values
    assert {name: (one.shape, one.dtype) for name, one in found.items()} == {
        name: (one.shape, one.dtype) for name, one in written.items()
    }
    for name in ("b", "c", "d"):
        assert torch.equal(found[name].whole(), written[name])
    for box in (
        (0, 5, 0, 6, 0, 7),
        (1, 3, 2, 2, 3, 4),
        (4, 1, 0, 6, 0, 1),
        (0, 5, 5, 1, 0, 7),
        (2, 2, 1, 4, 0, 7),
    ):
        (a, la, b, lb, c, lc) = box
        expected = written["a"][a : a + la, b : b + lb, c : c + lc]
        assert torch.equal(found["a"].box((a, b, c), (la, lb, lc)), expected)
        turned = torch.empty(lc, lb, la, dtype=torch.float64).permute(2, 1, 0)
        found["a"].fill(turned, (a, b, c))
        assert torch.equal(turned, expected.double())
    folder.close()


def _write(folder: Path, data: bytes) -> None:
    (folder / FILE).write_bytes(data)


def _header(folder: Path, header: object, data: bytes = b"12345678") -> None:
    text = json.dumps(header).encode()
    _write(folder, struct.pack("<Q", len(text)) + text + data)


def _cut(folder: Path, keep: Callable[[int], int]) -> None:
    save_file(weights(), folder / FILE)
    data = (folder / FILE).read_bytes()
    _write(folder, data[: keep(len(data))])


def _index(folder: Path, place: str, **others: object) -> None:
    save_file({"a": torch.ones(2)}, folder / "1.safetensors")
    save_file({"a": torch.zeros(2)}, folder.parent / "outside.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": place}} | others))


def _entry(**changes: object) -> dict[str, object]:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda d: (d / "x").touch(), "has none of model.safetensors, model.*; it holds x$"),
    "adapter": (lambda d: (d / "adapter_model.safetensors").touch(), "holds an adapter alone"),
    "empty": (lambda d: _write(d, b""), "has 0 bytes, and is no file of safetensors; copy"),
    "rubbish": (lambda d: _write(d, b"\xff" * 99), "does not begin as a file of safetensors does"),
    "cut in the header": (
        lambda d: _cut(d, lambda n: 20),
        "ends after 20 bytes, in the middle of its header",
    ),
    "cut": (lambda d: _cut(d, lambda n: n - 1), "ends after .* bytes, and tensor '.' goes on to"),
    "no JSON": (lambda d: _write(d, struct.pack("<Q", 2) + b"{]"), "has a header that is no JSON"),
    "too deep": (lambda d: _write(d, struct.pack("<Q", 99999) + b"[" * 99999), "header that is"),
    "a list": (lambda d: _header(d, []), "has a header that is no table"),
    "no offsets": (lambda d: _header(d, {"a": {"dtype": "F32"}}), "no dtype, shape and place of tensor 'a'"),
    "negative": (lambda d: _header(d, _entry(data_offsets=[-8, 0])), "'a' in its header that is no number"),
    "other size": (
        lambda d: _header(d, _entry(shape=[3])),
        r"has 8 bytes for tensor 'a', F32 of shape \(3,\)",
    ),
    "unknown dtype": (lambda d: _header(d, _entry(dtype="F4")), "'a' has elements of 'F4'; known are"),
    "a pipe": (lambda d: os.mkfifo(d / FILE), "it is no regular file"),
    "no map": (lambda d: _index(d, "1.safetensors", weight_map=[]), "has no weight_map"),
    "missing shard": (lambda d: _index(d, "2.safetensors"), "names 2.safetensors, which is missing"),
    "other shard": (
        lambda d: (_index(d, "2.safetensors"), save_file({"b": torch.ones(1)}, d / "2.safetensors")),
        "says that 'a' is in 2.safetensors, which does not have it",
    ),
    "outside": (lambda d: _index(d, "../outside.safetensors"), "outside of the folder"),
    "absolute": (lambda d: _index(d, str(d / "1.safetensors")), "outside of the folder"),
    "quantized": (
        lambda d: (d / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}'),
        r"the weights are quantized \(gptq\)",
    ),
    "pickled": (
        lambda d: torch.save({"a": os.getcwd}, d / "pytorch_model.bin"),
        "cannot be read: Weights only .*; convert it",
    ),
    "pickled, cut": (
        lambda d: (
            torch.save({"a": torch.ones(99)}, d / "pytorch_model.bin"),
            os.truncate(d / "pytorch_model.bin", 700),
        ),
        "cannot be read: .*; copy or download",
    ),
    "pickled, wrapped": (
        lambda d: torch.save({"state_dict": {"a": torch.ones(9)}, "epoch": 1}, d / "pytorch_model.bin"),
        "has the weights in 'state_dict', .*; save that part of it alone",
    ),
    "pickled, empty": (lambda d: (d / "pytorch_model.bin").touch(), "cannot be read: .*; copy or download"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path, name: str) -> None:
    damage, text = DAMAGES[name]
    folder = tmp_path / "model"
    folder.mkdir()
    damage(folder)
    with pytest.raises(CheckpointError, match=f"(?s){folder}.*{text}"):
        PretrainedFolder(folder)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / FILE)
    folder = PretrainedFolder(tmp_path)
    os.truncate(tmp_path / FILE, 500)
    with pytest.raises(CheckpointError, match=f"{FILE} ends after 500 bytes, in the middle of a tensor"):
        folder.values["a"].whole()
    folder.close()


def test_links_as_a_hub_makes_them_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, blobs / "0123")
    (snapshot / FILE).symlink_to("../../blobs/0123")
    folder = PretrainedFolder(snapshot)
    assert torch.equal(folder.values["a"].whole(), torch.ones(2))
    folder.close()
