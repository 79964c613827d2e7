"""`deepspeed.utils.torch.required_torch_version`."""

from __future__ import annotations

import pytest
import torch

from dslaunch.drop_in.torch_version import required_torch_version


def test_versions_are_compared_as_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert required_torch_version(min_version=1.8)
    assert required_torch_version("2.9")
    assert required_torch_version(min_version="2.10.1", max_version="2.11")
    assert not required_torch_version(min_version="2.10.2")
    assert not required_torch_version(max_version=2.9)
    with pytest.raises(AssertionError, match="needs a min_version or a max_version"):
        required_torch_version()
