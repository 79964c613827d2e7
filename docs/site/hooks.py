"""What the documents' site has beside the pages: the reference of every public name, made of its docstring.

mkdocs calls the functions `on_...`. The pages themselves stay plain Markdown; see [Note: The site] below.

[Note: The site]
- The front page is the repository's README, whose last table gives way to the longer one of docs/README.md.
- A page for each public module is made here, with one entry for each of its public names. mkdocstrings fills
  the entries in from the sources.
- Links to files outside of docs/, such as the hostfiles, lead nowhere on a site: their text stays, and the
  path.
- A link whose text is the path of a page shows the title of the page instead.
- Searches show guides first, then what is looked up, then design: SEARCH_BOOSTS.
- Nothing is loaded from another server: no fonts, no scripts, no pictures.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT / "docs" / "site"))  # public_names.py lies beside this file

from public_names import Entry, entries_by_module  # noqa: E402  (see above)

FRONT_PAGE = "README.md"
SEARCH_BOOSTS = {  # by the beginning of a page's path; 1 for any other
    "FAQ": 2.0,
    "design/": 0.2,
    "CONTRIBUTING": 0.2,
    "reference/": 0.3,
    "examples/": 0.4,
    "launch/messages": 0.5,
}
API_FOLDER = "reference/api"
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
SCHEME = re.compile(r"[a-z][a-z+.-]*:|#|//")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages of the reference."""
    for module, entries in entries_by_module().items():
        uri = f"{API_FOLDER}/{module}.md"
        files.append(File.generated(config, uri, content=reference_page(module, entries)))
    return files


def reference_page(module: str, entries: tuple[Entry, ...]) -> str:
    """The names of one module, each with what mkdocstrings makes of its docstring."""
    parts = [f"# {module}"]
    for entry in entries:
        if entry.kind == "module":
            whole = f"{module}.{entry.name}"
            parts.append(f"## `{entry.name}`\n\n{entry.summary} Its names: [{whole}]({whole}.md)")
        elif entry.source is None:
            parts.append(f"## `{entry.name}`\n\n{entry.summary}")
        else:
            options = "    options:\n      heading: " + entry.name
            parts.append(f"::: {entry.source}\n{options}")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Take away links that lead out of docs/, and name those to pages by their titles."""
    docs = CHECKOUT / "docs"
    folder = (docs / page.file.src_uri).parent
    if page.file.src_uri == FRONT_PAGE:
        markdown = front_page((CHECKOUT / FRONT_PAGE).read_text(encoding="utf-8"), markdown)
    for beginning, boost in SEARCH_BOOSTS.items():
        if page.file.src_uri.startswith(beginning):
            page.meta.setdefault("search", {"boost": boost})

    def shown(match: re.Match[str]) -> str:
        text, target = match.groups()
        if SCHEME.match(target):
            return match[0]
        path = (folder / target.partition("#")[0]).resolve()
        if not path.is_relative_to(docs):
            return f"{text} (`{path.relative_to(CHECKOUT)}` in the repository)"
        if text == target and path.suffix == ".md" and path.is_file():
            return f"[{title_of(path)}]({target})"
        return match[0]

    return LINK.sub(shown, markdown)


def front_page(readme: str, index: str) -> str:
    """The README of the repository as a page of docs/, with the whole index at its end.

    Errors: ValueError if one of the two has no heading where it is cut
    """
    beginning, found, _ = readme.partition("\n## Where to go on\n")
    title, newline, table = index.partition("\n")
    if not found or not newline or not title.startswith("# "):
        raise ValueError(
            "README.md or docs/README.md: no heading where it is cut; say in hooks.py which it is"
        )
    return LINK.sub(_from_docs, beginning) + f"\n#{title}\n{table}"


def _from_docs(match: re.Match[str]) -> str:
    text, target = match.groups()
    if SCHEME.match(target):
        return match[0]
    return f"[{text}]({target.removeprefix('docs/') if target.startswith('docs/') else f'../{target}'})"


def title_of(path: Path) -> str:
    """The first heading of a page."""
    return next(line for line in path.read_text().splitlines() if line.startswith("# ")).removeprefix("# ")
