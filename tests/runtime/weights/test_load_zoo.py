"""Every type of model of transformers, in its smallest form: names, tensors and tables are those that
from_pretrained() makes of the same files.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch import ConfigError
from dslaunch.runtime.checkpoint.pretrained.folder import PretrainedFolder
from dslaunch.runtime.engine.made_on_meta import take_from_meta
from dslaunch.runtime.weights.file_names import FileNames

zoo = pytest.importorskip("tests.drop_in.zoo", reason="needs transformers")
# torch's LSTM keeps weak references to its parameters; two compute with tensors that are no buffers.
REFUSED = {
    "bark",
    "encodec",
    "mimi_encoder",
    "nemotron3_5_asr",
    "nemotron_asr_streaming",
    "parakeet_rnnt",
    "parakeet_tdt",
    "pocket_tts_audio_tokenizer_encoder",
}


def _pretrained(kind: str, name: str, folder: Path) -> tuple[Any, Any]:
    """Write a model to the folder; return its config, and what from_pretrained() makes of it."""
    try:
        torch.manual_seed(0)
        config, of_class = zoo.config_of(kind), zoo.class_of(name)
        model = of_class(copy.deepcopy(config))
        model.save_pretrained(folder)
        return config, of_class.from_pretrained(folder)
    except Exception as error:  # types that the zoo cannot make, or whose files are of another kind
        pytest.skip(f"{type(error).__name__}: {error}")


def _names(model: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    first: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, str] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            known = first.setdefault(id(value), name)
            if known == name:
                shapes[name] = tuple(value.shape)
            else:
                aliases[name] = known
    return shapes, aliases


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "name"), zoo.classes().items())
def test_a_model_is_made_of_its_files_as_from_pretrained_makes_it(
    kind: str, name: str, tmp_path: Path
) -> None:
    with warnings.catch_warnings(action="ignore"):
        config, expected = _pretrained(kind, name, tmp_path)
    shapes, aliases = _names(expected)
    folder = PretrainedFolder(tmp_path)
    matched = FileNames(expected, shapes=shapes, aliases=aliases)(folder.values, str(tmp_path))
    own = expected.state_dict()
    assert set(matched.unexpected) == set()
    assert shapes.keys() - matched.values.keys() <= set(matched.may_be_missing)
    for one, values in matched.values.items():
        assert torch.equal(values.whole().to(own[one].dtype), own[one]), one
    folder.close()
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        model = type(expected)(config)
    if kind in REFUSED:
        with pytest.raises(ConfigError, match="on the meta device"):
            take_from_meta(model, device=torch.device("cpu"))
        return
    left = take_from_meta(model, device=torch.device("cpu"))
    tables = {one: buffer for one, buffer in expected.named_buffers() if one not in left}
    for one, buffer in tables.items():
        assert torch.equal(model.get_buffer(one), buffer), one
