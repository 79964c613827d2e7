"""The device of these tests: the host, running the kernels' source."""

from __future__ import annotations

import pytest

from tests.kernels.cuda.host_device import HostDevice


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory) -> HostDevice:
    """Programs are compiled once for all tests."""
    return HostDevice(tmp_path_factory.mktemp("host-kernels"))
