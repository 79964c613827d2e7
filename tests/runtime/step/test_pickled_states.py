"""What a program saves that saves its optimizer's state_dict by itself."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from dslaunch.runtime.errors import CheckpointError
from dslaunch.runtime.optimizers.adam import AdamFormula
from dslaunch.runtime.step.flat_optimizer import FlatOptimizer
from dslaunch.runtime.step.fused_rule import FusedRule


def test_a_state_dict_can_be_saved_and_what_is_loaded_still_says_where_the_states_are() -> None:
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": 0.5}]
    optimizer = FlatOptimizer(groups, defaults={"lr": 0.5}, rule=FusedRule(AdamFormula(adam_w_mode=True)))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded["param_groups"][0]["lr"] == 0.5
    with pytest.raises(CheckpointError, match=r"use engine.save_checkpoint\(\)"):
        len(loaded["state"])
