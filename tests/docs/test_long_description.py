"""What a package index shows of the README has no link that leads nowhere there."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.test_links import CHECKOUT, relative_links

README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
REPOSITORY = "https://example.org/dslaunch"


@pytest.fixture(scope="module")
def provider() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "long_description", CHECKOUT / "docs" / "site" / "long_description.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("repository", ["", REPOSITORY])
def test_no_link_is_relative_and_no_word_is_lost(provider: ModuleType, repository: str) -> None:
    text = provider.long_description(README, repository)
    assert relative_links(README)
    assert relative_links(text) == []
    assert "pip install 'dslaunch[train]'    # without [train]" in text
    for heading in (line for line in README.splitlines() if line.startswith("#")):
        assert heading in text.splitlines()


def test_links_and_pictures_lead_to_the_repository_where_it_has_an_address(provider: ModuleType) -> None:
    text = provider.long_description(README, f"{REPOSITORY}/")
    assert f"]({REPOSITORY}/raw/HEAD/docs/reference/overview.png)" in text
    assert f"[contributing]({REPOSITORY}/blob/HEAD/docs/CONTRIBUTING.md)" in text


def test_without_an_address_a_link_says_where_the_file_is(provider: ModuleType) -> None:
    text = provider.long_description(README)
    assert "contributing (`docs/CONTRIBUTING.md`)" in text
    assert "docs/reference/overview.png*\n" in text
    assert "![" not in text


def test_links_that_are_absolute_stay(provider: ModuleType) -> None:
    line = f"{provider.FROM_A_CLONE} [a](https://example.org/b.md) [c](#install)"
    assert provider.long_description(line).endswith("[a](https://example.org/b.md) [c](#install)")


def test_it_is_the_metadata_of_a_package(
    provider: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(CHECKOUT)
    found = provider.dynamic_metadata({}, {"name": "dslaunch", "urls": {"Repository": REPOSITORY}})
    assert found == {
        "readme": {"content-type": "text/markdown", "text": provider.long_description(README, REPOSITORY)}
    }
    with pytest.raises(ValueError, match="no settings"):
        provider.dynamic_metadata({"input": "README.md"}, {})
    (tmp_path / "README.md").write_text("# another\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="no line with"):
        provider.dynamic_metadata({}, {})
