"""The page of a planned job."""

from __future__ import annotations

from dslaunch.launcher.page.plan_page import PlannedMemory, plan_page

GIB = 2**30


def test_the_page_has_the_verdict_the_notes_the_memory_and_the_tables() -> None:
    rank = PlannedMemory(
        name="rank 0",
        points=((0, (("parameters", GIB),)), (9, (("parameters", GIB), ("activations", 3 * GIB)))),
        phases=(0, 5),
    )
    on_cpu = PlannedMemory(name="rank 1", points=(), phases=(0,))
    page = plan_page(
        title="plan of <train.py>",
        fits=False,
        lines=["does not fit: 4.0 of 2.0 GiB", "assumed: 1.0 GiB", "", "Host memory:", "  node1  4"],
        ranks=[rank, on_cpu],
    )
    assert '<h1>plan of &lt;train.py&gt;</h1><span class="state bad">does not fit</span>' in page
    assert '<p>does not fit: 4.0 of 2.0 GiB</p><p class="soft">assumed: 1.0 GiB</p>' in page
    assert "Memory of rank 0: parameters 40 %, activations 60 %." in page
    assert "Memory of rank 1" not in page
    assert "Host memory:\n  node1  4</pre>" in page
