"""docs/guide-config.md says what the code does.

`python tests/runtime/config/test_guide.py` writes its tables anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from dslaunch.runtime.config import load_config
from dslaunch.runtime.config.key import KEYS, Fate, Key

GUIDE = Path(__file__).parents[3] / "docs" / "guide-config.md"
TABLES = re.compile(r"(?<=<!-- keys: begin -->\n).*(?=<!-- keys: end -->)", flags=re.DOTALL)


def guide_tables() -> str:
    """The tables of docs/guide-config.md."""

    def row(key: Key, *cells: str) -> str:
        types = f" ({', '.join(key.types)})" if key.types else ""
        return f"| `{key.path}`{types} | {' | '.join(cells)} |"

    def table(fate: Fate, *heads: str) -> list[str]:
        return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows[fate]]

    def cells(key: Key) -> tuple[str, ...]:
        if key.fate is Fate.REFUSED:
            return (f"`{key.off}`" if key.off else "leave it out", key.note)
        return (key.note,)

    rows = {fate: [row(key, *cells(key)) for key in KEYS if key.fate is fate] for fate in Fate}
    details = sorted({key.path.rpartition(".")[0] for key in KEYS if key.fate is Fate.DETAIL})
    return "\n".join(
        [
            "### Used\n",
            *table(Fate.USED, "key", "meaning"),
            "\n### Accepted, without effect\n",
            *table(Fate.HINT, "key", "why"),
            "\n### Refused when on\n",
            *table(Fate.REFUSED, "key", "what may be given", "instead"),
            "\nThe other keys of these sections are checked too, but mean nothing while their section is off: "
            + ", ".join(f"`{section}`" for section in details)
            + ".\n",
        ]
    )


def test_the_tables_of_the_guide_are_those_of_the_code() -> None:
    found = TABLES.search(GUIDE.read_text(encoding="utf-8"))
    assert found is not None
    assert found.group() == guide_tables()


def test_the_example_of_the_guide_loads(tmp_path: Path) -> None:
    (example,) = re.findall(r"```json\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    path = tmp_path / "ds_config.json"
    path.write_text(example, encoding="utf-8")
    config = load_config(path, world_size=8)
    assert (config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps) == (
        64,
        4,
        2,
    )


if __name__ == "__main__":
    GUIDE.write_text(
        TABLES.sub(lambda _: guide_tables(), GUIDE.read_text(encoding="utf-8")), encoding="utf-8"
    )
