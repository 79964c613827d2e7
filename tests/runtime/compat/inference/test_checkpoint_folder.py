"""Keys of DeepSpeed that name a checkpoint come to one folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.runtime.compat.inference.checkpoint_folder import checkpoint_folder
from dslaunch.runtime.compat.inference.config import DeepSpeedInferenceConfig
from dslaunch.runtime.errors import CheckpointError


def _folder(**options: Any) -> str | None:
    return checkpoint_folder(DeepSpeedInferenceConfig(**options))


def test_folders_files_and_lists_of_files_come_to_one_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    listed = tmp_path / "model" / "listed.json"
    listed.write_text(json.dumps({"type": "BLOOM", "checkpoints": ["a.bin", "b.bin"], "version": 1.0}))
    model = str(tmp_path / "model")
    assert _folder() is None
    assert _folder(checkpoint=model) == model
    assert _folder(checkpoint="model", base_dir=str(tmp_path)) == model
    assert _folder(checkpoint_config={"checkpoint_dir": model}) == model
    assert _folder(checkpoint=f"{model}/model.safetensors.index.json") == model
    assert _folder(checkpoint=str(listed)) == model
    assert _folder(checkpoint=str(listed), base_dir="/other") == "/other"
    assert _folder(checkpoint={"checkpoints": ["/x/a.bin", "/x/b.bin"]}) == "/x"
    assert _folder(checkpoint={"checkpoints": ["sub/a.bin"]}, base_dir=model) == f"{model}/sub"
    assert _folder(checkpoint={"checkpoints": []}, base_dir=model) == model


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"checkpoints": {"tp": [["a"]], "non_tp": ["b"]}},
            "that DeepSpeed's kernels have divided over ranks",
        ),
        ({"checkpoints": []}, 'has no list of files under "checkpoints"'),
        ({"checkpoints": ["/a/x", "/b/x"]}, "its files lie in several folders, /a, /b; give one folder"),
        ("no_such.json", "No such file or directory.*; give a folder with weights"),
    ],
)
def test_what_is_no_folder_is_refused(given: Any, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        _folder(checkpoint=given)
