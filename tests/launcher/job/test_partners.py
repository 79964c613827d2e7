"""The partner of each host, which gets copies of its snapshots."""

from __future__ import annotations

from collections import Counter

import pytest

from dslaunch.launcher.job.partners import partners_of


@pytest.mark.parametrize(
    ("racks", "partners"),
    [
        ("", ()),
        ("-", (None,)),
        ("--", (1, 0)),
        ("---", (1, 2, 0)),
        ("------", (3, 4, 5, 0, 1, 2)),
        ("ab", (1, 0)),
        ("aaaa", (2, 3, 0, 1)),  # all in one rack: as far away as can be
        ("aabb", (2, 3, 0, 1)),
        ("abab", (1, 0, 3, 2)),
        ("aaab", (3, 3, 3, 0)),
        ("a-b-", (2, 3, 0, 1)),  # of some the rack is not known
    ],
)
def test_a_partner_is_in_another_rack_or_far_away(racks: str, partners: tuple[int | None, ...]) -> None:
    found = partners_of([one.replace("-", "") for one in racks])
    assert found == partners
    assert all(partner != place for place, partner in enumerate(found))


def test_no_host_has_the_copies_of_many_where_racks_are_alike() -> None:
    found = Counter(partners_of([f"r{place // 8}" for place in range(64)]))
    assert max(found.values()) <= 2
