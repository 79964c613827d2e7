"""Which axes of the ranks are inside which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ORDER = ("pp", "dp", "sp", "tp")  # the outermost first, unless another order is given


def full_order(order: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return an order of all axes in which those with more than one rank stand as in `order`: the same one
    for all that make no difference.

    Errors: ValueError if one with more than one rank is left out
    """
    long = [name for name in ORDER if sizes[name] > 1]
    left_out = [name for name in long if name not in order]
    if left_out:
        raise ValueError(
            f"the order {', '.join(order)} leaves out {left_out[0]}, which has {sizes[left_out[0]]} ranks; "
            "name all axes with more than one rank, the outermost first"
        )
    named = [name for name in order if name in long]
    if named == long:
        return ORDER
    if "sp" not in named and "dp" in named:  # ranks with data of their own, which may yet share sequences
        named.insert(named.index("dp") + 1, "sp")
    return (*(name for name in ORDER if name not in named), *named)
