"""The check of every key of a config against the table of keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .keys.key import Fate, Key
from .keys.value import OBJECT, show, show_name

_AUTO = "auto"
_MEANS_DEFAULT = "data_types.keep_in_fp32_modules"  # "auto" is DeepSpeed's own word for its default there
_TOP = "the top level"
_SHORT = ("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold")
_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


@dataclass(slots=True, kw_only=True)
class Sifted:
    """A config taken apart: what is used, and what there is to say about the rest."""

    used: dict[str, Any] = field(default_factory=dict)  # nested as the config is, only keys with Fate.USED
    hints: list[str] = field(default_factory=list)  # dotted keys that need nothing here
    unmet: list[str] = field(default_factory=list)  # dotted keys that ask for what is not done
    unknown: dict[str, str] = field(default_factory=dict)  # dotted key -> the line about it
    autos: list[str] = field(default_factory=list)  # dotted keys that still say "auto"
    left_out: list[str] = field(default_factory=list)  # dotted keys that said "auto", and are gone
    old_names: list[str] = field(default_factory=list)  # "old (now new)"
    problems: dict[str, str] = field(default_factory=dict)  # dotted key -> the line about it


def rename_old(values: dict[str, Any], sifted: Sifted, *, is_lenient: bool = False) -> dict[str, Any]:
    """Return `values` with today's names for older spellings.

    A value under both names is a fault if they differ. Where `is_lenient`, bf16 counts beside a bfloat16, as
    in DeepSpeed.
    """
    values = _with_new_names(values, {"bfloat16": "bf16"}, "", sifted, new_counts=is_lenient)
    zero = values.get("zero_optimization")
    if isinstance(zero, dict):
        names = {short: f"stage3_{short}" for short in _SHORT}
        values["zero_optimization"] = _with_new_names(zero, names, "zero_optimization.", sifted)
    if isinstance(zero, bool):
        values["zero_optimization"] = {"stage": int(zero)}
        sifted.old_names.append(f'zero_optimization {show(zero)} (now {{"stage": {int(zero)}}})')
    for old, new in _OFFLOADS.items():
        zero = values.get("zero_optimization")
        if isinstance(zero, dict) and zero.get(old) is True:
            values["zero_optimization"] = _with_offload(zero, old, new, sifted)
    return values


def _with_offload(zero: dict[str, Any], old: str, new: str, sifted: Sifted) -> dict[str, Any]:
    zero = {name: value for name, value in zero.items() if name != old}
    path = f"zero_optimization.{old}"
    if zero.get(new) is not None:
        sifted.problems[path] = f"{path} true is the old name of {new}, which is given too; keep {new}"
    else:
        zero[new] = {"device": "cpu"}
        sifted.old_names.append(f'{path} true (now {new} {{"device": "cpu"}})')
    return zero


def _with_new_names(
    values: dict[str, Any], names: dict[str, str], path: str, sifted: Sifted, *, new_counts: bool = False
) -> dict[str, Any]:
    """The section at `path` with `names`, from old to new; `new_counts` where both are given."""
    values = dict(values)
    for old, new in names.items():
        value, known = values.pop(old, None), values.get(new)
        if value is None:
            continue
        if known is None:
            values[new] = value
            sifted.old_names.append(f"{path}{old} (now {new})")
        elif value == known:
            sifted.old_names.append(f"{path}{old} (now {new}, which says the same)")
        elif new_counts:
            sifted.unmet.append(f"{path}{old} (now {new}, which is given too and counts)")
        else:
            sifted.problems[f"{path}{old}"] = (
                f"{path}{old} is another name of {new}, which is given too; keep {new}"
            )
    return values


def _autos(value: Any, path: str) -> Iterator[str]:
    if value == _AUTO:
        if path != _MEANS_DEFAULT:
            yield path
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _autos(inner, f"{path}.{show_name(name)}" if path else show_name(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _autos(inner, f"{path}[{index}]")


def leave_out_autos(values: dict[str, Any], sifted: Sifted) -> dict[str, Any]:
    """`values` without the keys that say "auto", or have it in a list."""

    def without(inner: dict[str, Any]) -> dict[str, Any]:
        return {
            name: without(value) if isinstance(value, dict) else value
            for name, value in inner.items()
            if isinstance(value, dict) or not any(_autos(value, name))
        }

    sifted.left_out.extend(_autos(values, ""))
    return without(values)


class _Sieve:
    """Check of the keys in one pass over a config."""

    def __init__(self, keys: dict[str, Key], sifted: Sifted) -> None:
        self._keys = keys
        self._sections = {
            "",
            *(path[:dot] for path in keys for dot, letter in enumerate(path) if letter == "."),
        }
        self._sifted = sifted
        self._listed: set[str] = set()  # sections whose names have been told

    def section(self, values: dict[str, Any], path: str, used: dict[str, Any]) -> None:
        """Sort the keys of the section at `path`; what is used goes into `used`."""
        for name, value in values.items():
            inner = f"{path}.{name}" if path else name
            if not name or "." in name:  # otherwise the key "bf16.enabled" would pass for enabled inside bf16
                self._sifted.unknown[inner] = self._unknown(path, name)
            elif inner in self._sections:
                if isinstance(value, dict):
                    used_there: dict[str, Any] = {}
                    self.section(value, inner, used_there)
                    if used_there:
                        used[name] = used_there
                elif value is not None and value != _AUTO:
                    self._sifted.problems[inner] = f"{inner} {show(value)} is not {OBJECT.words}"
            elif inner not in self._keys:
                self._sifted.unknown[inner] = self._unknown(path, name)
            elif inner == _MEANS_DEFAULT and value == _AUTO:
                continue
            elif value is not None and not any(_autos(value, inner)):
                self._leaf(self._keys[inner], name, value, used)

    def _leaf(self, key: Key, name: str, value: Any, used: dict[str, Any]) -> None:
        if key.fate is Fate.USED:
            used[name] = value
        elif not key.kind.accepts(value):
            self._sifted.problems[key.path] = f"{key.path} {show(value)} is not {key.kind.words}"
        elif key.fate is Fate.HINT and not key.is_off(value):
            self._sifted.hints.append(key.path)
        elif key.fate is Fate.UNMET and not key.is_off(value):
            self._sifted.unmet.append(key.path)
        elif key.fate is Fate.REFUSED and not key.is_off(value):
            advice = "; ".join(filter(None, [key.off and f"{key.off} is", key.note]))
            self._sifted.problems[key.path] = (
                f"{key.path} {show(value)} is not available in this version; {advice}"
            )

    def _names_in(self, path: str, *, used_only: bool) -> list[str]:
        prefix = f"{path}." if path else ""
        names = {
            key.path[len(prefix) :].split(".")[0]: None
            for key in self._keys.values()
            if key.path.startswith(prefix) and (not used_only or key.fate is Fate.USED)
        }
        return list(names)

    def _unknown(self, path: str, name: str) -> str:
        names = self._names_in(path, used_only=False)
        lower = {known.lower(): known for known in names}
        near = [lower[hit] for hit in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.7)]
        elsewhere = [known for known in self._keys if known.rpartition(".")[2] == name]
        elsewhere += [
            section for section in sorted(self._sections) if section and section.rpartition(".")[2] == name
        ]
        if near and path:  # a key of this name in a section about something else is not meant
            top = path.partition(".")[0]
            elsewhere = [known for known in elsewhere if known.partition(".")[0] in (top, name)]
        parts = [f"{f'{path}.' if path else ''}{show_name(name)} is not a known key"]
        if f"{path}.{name}" in self._keys or (not path and name in self._keys):
            section, _, last = name.rpartition(".")
            parts.append(f"write it as the key {last} inside {section}")
        elif name == "max_grad_norm":
            parts.append("did you mean gradient_clipping at the top level?")
        elif elsewhere:
            parts.append(f"it is known as {' or '.join(elsewhere[:3])}")
        elif name.startswith(("_", "//", "#")) or "comment" in name.lower():
            parts.append("a comment starts with // and is no key")
        elif near:
            parts.append(f"did you mean {' or '.join(near)}?")
        if len(parts) == 1 and path not in self._listed:  # there is no hint, and the keys were not listed yet
            self._listed.add(path)
            known = self._names_in(path, used_only=True) or names
            parts.append(f"{'used at ' + _TOP if not path else path + ' takes'}: {', '.join(known)}")
        return "; ".join(parts)


def sift(values: dict[str, Any], keys: dict[str, Key], sifted: Sifted) -> None:
    """Check every key of `values` against `keys`, and sort what they say into `sifted`."""
    sifted.autos.extend(_autos(values, ""))
    _Sieve(keys, sifted).section(values, "", sifted.used)
