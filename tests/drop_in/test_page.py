"""docs/reference/compatibility.md says what the tables of names and of keys say.

`python -m tests.drop_in.test_page` writes it anew.
"""

from __future__ import annotations

from pathlib import Path

from dslaunch import drop_in
from dslaunch.drop_in.names import MODULES
from dslaunch.drop_in.names.table import INSIDE, TOPICS, Module, NameFate, NameRow
from dslaunch.runtime.compat.engine.absent import names_by_reason
from dslaunch.runtime.config.keys.key import Fate as KeyFate, Key
from tests.runtime.config.documented import documented

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "compatibility.md"
HEAD = f"""\
# Compatibility with DeepSpeed

Programs that `import deepspeed` run on dslaunch, and get **{drop_in.VERSION}**: the level of DeepSpeed whose
names and meanings are served here, and whose they are. How a program finds it, and what else is on the way:
[from-deepspeed.md](../start/from-deepspeed.md). This page is written from the tables that the code itself
goes by.

- **works**: the same call, the same meaning.
- **mapped**: ours in its place, with the difference that stands beside it.
- **refused**: not here. It can be imported and named all the same, also as a type or as a base class, and so
  can every name of every module of DeepSpeed's that is refused as a whole: a program imports more than it
  uses. Calling it, or doing anything with a constant, raises NotImplementedError with its name and the
  reason. `hasattr()` says no.

A name that starts with an underscore is served where a library that people use needs it.
"""
KEYS_HEAD = """
## The keys of a ds_config

By section; what a key that works means is in [config.md](../train/config.md). What is accepted needs nothing
here, and a line of level INFO names it; what is not done is named by a warning; what is refused is an error
when on, or when anything but the value that is named is asked for. A program that imports `deepspeed` is read
leniently: a warning names unknown keys, and those that still say `"auto"`, and they count as left out.
"""
ENGINE_HEAD = """
## The engine

`deepspeed.initialize()` returns the engine that [engine.md](../train/engine.md) describes. Of the methods and
attributes of DeepSpeed's engine these are not there; `engine.<name>` says why.
"""
KEY_WORDS = {
    KeyFate.USED: "works",
    KeyFate.HINT: "accepted",
    KeyFate.UNMET: "not done",
    KeyFate.REFUSED: "refused",
    KeyFate.DETAIL: "refused",
}
TOP = "The top level"
IDLE = "has no effect, which a warning says: "


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def module_table(module: Module) -> list[str]:
    def note_of(row: NameRow) -> str:
        return (
            f"{row.note}: [{row.topic}](#{anchor(row.topic)})" if row.fate == NameFate.REFUSED else row.note
        )

    cells: dict[tuple[str, str], list[str]] = {}
    for row in module.rows:
        cells.setdefault((row.fate, note_of(row)), []).extend(row.names)
    rows = [f"| {fate} | {listed(names)} | {note} |" for (fate, note), names in cells.items()]
    if module.why is not None:
        rows.append(f"| refused | all others | {module.why}: [{module.topic}](#{anchor(module.topic)}) |")
    return [f"\n### `{module.name}`\n", "| | names | |", "|---|---|---|", *rows]


def key_tables() -> list[str]:
    """A table for each section of a ds_config, and for its own sections with it."""

    def is_idle(key: Key) -> bool:
        return key.note.startswith(IDLE)

    def word_of(key: Key) -> str:
        return "not done" if is_idle(key) else KEY_WORDS[key.fate]

    def note_of(key: Key) -> str:
        if key.fate is KeyFate.USED:
            return key.note.removeprefix(IDLE) if is_idle(key) else ""
        if key.fate is KeyFate.DETAIL:
            return "with its section"
        return "; ".join(filter(None, [key.off and f"unless `{key.off}`", key.note]))

    tables: dict[str, dict[tuple[str, str], list[str]]] = {TOP: {}}
    keys = documented()
    sections = {key.path.partition(".")[0] for key in keys if "." in key.path}
    order = tuple(KEY_WORDS.values())
    for key in sorted(keys, key=lambda key: order.index(word_of(key))):
        first, _, rest = key.path.partition(".")
        section = first if rest or first in sections else TOP
        names = tables.setdefault(section, {}).setdefault((word_of(key), note_of(key)), [])
        names.extend([rest or first] if (rest or first) not in names else [])
    lines = []
    for section, cells in tables.items():
        lines += [f"\n### {section if section == TOP else f'`{section}`'}\n", "| | keys | |", "|---|---|---|"]
        lines += [f"| {word} | {listed(names)} | {note} |" for (word, note), names in cells.items()]
    return lines


def anchor(topic: str) -> str:
    return topic.lower().replace(" ", "-")


def page() -> str:
    served = [module for module in MODULES.values() if module.rows]
    lines = [HEAD, "## What there is, by module", *(line for one in served for line in module_table(one))]
    lines += ["\n## What there is not\n"]
    for topic, text in TOPICS.items():
        lines += [f"### {topic}\n", f"{text}\n"]
        by_reason: dict[str, list[str]] = {}
        for module in MODULES.values():
            if module.why is not None and module.topic == topic and not module.rows:
                by_reason.setdefault(module.why, []).append(module.name)
            for row in module.rows:
                if row.topic == topic and topic != INSIDE:  # those are above, with their modules
                    by_reason.setdefault(row.note, []).extend(f"{module.name}.{name}" for name in row.names)
        lines += [f"- {listed(names)} {why}" for why, names in by_reason.items()]
        lines += [""] if by_reason else []
    lines += [ENGINE_HEAD.strip() + "\n", "| not there | instead |", "|---|---|"]
    lines += [f"| {listed(list(names))} | {why} |" for why, names in names_by_reason()]
    lines += [KEYS_HEAD.rstrip(), *key_tables()]
    return "\n".join(lines) + "\n"


def test_the_page_is_the_tables() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
