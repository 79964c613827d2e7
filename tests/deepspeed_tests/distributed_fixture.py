"""A plugin of pytest that makes a fixture of each class that DeepSpeed's harness derives from its DistributedFixture.

The harness marks the class with an attribute that pytest reads up to 8.3. From 9.1 on a plugin can register a fixture itself.
"""

from __future__ import annotations

import inspect

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    """Register `obj`, a class that the module defines, under its name; their conftest.py then runs it before the test."""
    if inspect.isclass(obj) and getattr(obj, "is_dist_fixture", False) and not inspect.isabstract(obj):
        pytest.register_fixture(name=name, func=obj, node=collector)
