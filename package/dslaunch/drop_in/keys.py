"""The keys of a ds_config, a schedule's parameters and a checkpoint, by the names of DeepSpeed's
constants: KEY is "key".

The table of names says which there are.
"""

from __future__ import annotations


def __getattr__(name: str) -> str:
    if not name.isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return name.lower()
