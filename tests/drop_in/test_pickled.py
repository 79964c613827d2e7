"""Classes that DeepSpeed's checkpoints name can be unpickled by programs that do so themselves."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator

import pytest

from dslaunch import drop_in


@pytest.fixture
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    finders = list(sys.meta_path)
    monkeypatch.syspath_prepend(drop_in.FOLDER)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "deepspeed":
            del sys.modules[name]
    sys.meta_path[:] = finders


def named(module: str, name: str, state: dict[str, object]) -> bytes:
    """What pickle writes of an object of this class with these attributes."""
    attributes = pickle.dumps(state, protocol=2)[2:-1]  # without the protocol and the stop
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b")\x81" + attributes + b"b."


@pytest.mark.usefixtures("_on_the_path")
def test_what_a_checkpoint_names_is_found_and_holds_its_attributes() -> None:
    scaler = pickle.loads(
        named("deepspeed.runtime.fp16.loss_scaler", "LossScaler", {"cur_scale": 8.0, "dynamic": False})
    )
    assert (scaler.loss_scale, scaler.dynamic) == (8.0, False)
    place = pickle.loads(
        named("deepspeed.utils.tensor_fragment", "fragment_address", {"numel": 3, "start": 4})
    )
    assert (place.numel, place.start) == (3, 4)
    stage = pickle.loads(b"\x80\x02cdeepspeed.runtime.zero.config\nZeroStageEnum\nK\x02\x85R.")
    assert stage == 2
