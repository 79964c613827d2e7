"""docs/train/config.md says what the code does.

`python -m tests.runtime.config.test_guide` writes its tables anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from dslaunch.runtime.config import Config, load_config
from dslaunch.runtime.config.keys.key import Fate, Key
from dslaunch.runtime.config.optimizer import AdamParams
from dslaunch.runtime.config.zero import ZeroConfig
from tests.runtime.config.documented import documented

GUIDE = Path(__file__).parents[3] / "docs" / "train" / "config.md"
TABLES = re.compile(r"(?<=<!-- keys: begin -->\n).*(?=<!-- keys: end -->)", flags=re.DOTALL)


def guide_tables() -> str:
    """The tables of docs/train/config.md."""

    def row(key: Key, *cells: str) -> str:
        types = f" ({', '.join(key.types)})" if key.types else ""
        return f"| `{key.path}`{types} | {' | '.join(cells)} |"

    def table(fate: Fate, *heads: str) -> list[str]:
        return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows[fate]]

    def cells(key: Key) -> tuple[str, ...]:
        if key.fate is Fate.REFUSED:
            return (f"`{key.off}`" if key.off else "leave it out", key.note)
        return (key.note,)

    keys = documented()
    rows = {fate: [row(key, *cells(key)) for key in keys if key.fate is fate] for fate in Fate}
    details = sorted({key.path.rpartition(".")[0] for key in keys if key.fate is Fate.DETAIL})
    return "\n".join(
        [
            "### Used\n",
            *table(Fate.USED, "key", "meaning"),
            "\n### Accepted, without effect\n",
            *table(Fate.HINT, "key", "why"),
            "\n### Accepted, but not done\n",
            *table(Fate.UNMET, "key", "what to know"),
            "\n### Refused when on\n",
            *table(Fate.REFUSED, "key", "what may be given", "why, or what instead"),
            (
                "\n"
                "The other keys of these sections are checked too, but mean nothing while "
                "their section is off: "
            )
            + ", ".join(f"`{section}`" for section in details)
            + ".\n",
        ]
    )


def test_the_tables_of_the_guide_are_those_of_the_code() -> None:
    found = TABLES.search(GUIDE.read_text(encoding="utf-8"))
    assert found is not None
    assert found.group() == guide_tables()


def example(kind: str, folder: Path) -> Config:
    (text,) = re.findall(rf"```{kind}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)
    path = folder / f"ds_config.{kind}"
    path.write_text(text, encoding="utf-8")
    return load_config(path, world_size=8)


def test_the_example_of_the_guide_loads(tmp_path: Path) -> None:
    config = example("json", tmp_path)
    assert (config.train_batch_size, config.micro_batch_size, config.gradient_accumulation_steps) == (
        64,
        4,
        2,
    )


def test_the_example_in_yaml_means_what_it_seems_to_mean(tmp_path: Path) -> None:
    assert example("yaml", tmp_path).describe() == {
        **load_config({"train_batch_size": 64}, world_size=8).describe(),
        "bf16": {
            "enabled": True,
            "check_grad_overflow": True,
            "bf16_master_weights_and_grads": False,
            "bf16_optimizer_states": False,
        },
        "optimizer": {
            "type": "AdamW",
            "params": AdamParams(lr=1e-4, betas=(0.9, 0.95)).model_dump(mode="json"),
        },
        "zero_optimization": ZeroConfig(stage=2).model_dump(mode="json", by_alias=True, exclude_none=True),
    }


if __name__ == "__main__":
    GUIDE.write_text(
        TABLES.sub(lambda _: guide_tables(), GUIDE.read_text(encoding="utf-8")), encoding="utf-8"
    )
