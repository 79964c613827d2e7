"""What a rank that has a part of a tensor takes of a whole one that DeepSpeed has saved."""

from __future__ import annotations

import torch

from dslaunch.runtime.checkpoint.deepspeed.pieces import whole_tensor
from dslaunch.runtime.checkpoint.deepspeed.reader import fill
from dslaunch.runtime.checkpoint.files.tensor_runs import TensorRun
from dslaunch.runtime.mesh.cut import cut_evenly


def test_a_run_of_a_part_is_filled_with_its_elements() -> None:
    whole = torch.arange(24.0).view(4, 6)
    cut = cut_evenly((4, 6), 1, index=1, size=2, packs=[2, 4])
    run = TensorRun(name="w", shape=(4, 6), start=2, numel=5, flat="", offset=0, cut=cut)
    out = torch.empty(5)
    fill(out, run, whole_tensor(whole))
    assert out.tolist() == cut.take(whole).flatten()[2:7].tolist()
    assert out.tolist() == [5.0, 7.0, 10.0, 11.0, 13.0]
