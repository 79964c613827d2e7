import os, tempfile, pytest, torch, sys
import dslaunch
from dslaunch.runtime.numerics.compare import compare
from dslaunch.runtime.numerics.report import lines_of
from tests.runtime.models import *

def run(rank, part, folder, changes, dtype="float32"):
    os.environ["DSLAUNCH_NUMERICS"] = f"{part}:99:{folder}"
    try:
        model = make_model()
        engine, *_ = dslaunch.initialize(model=model, config=make_config(**changes))
        print(type(engine).__mro__[:3]) if rank==0 else None
        return train_engine(engine, steps=3, dtype=getattr(torch, dtype))
    finally:
        del os.environ["DSLAUNCH_NUMERICS"]

@pytest.mark.parametrize("changes", [dict(stage=s) for s in range(4)] + [dict(stage=2, gradient_clipping=0.1, train_micro_batch_size_per_gpu=2), dict(stage=3, bf16={"enabled":True}), dict(stage=1, bf16={"enabled":True}, train_micro_batch_size_per_gpu=2), dict(stage=2, fp16={"enabled":True}),dict(stage=0, fp16={"enabled":True}),
 dict(optimizer={"type":"Muon"}), dict(optimizer={"type":"Lamb"}), dict(optimizer={"type":"SGD","params":{"lr":0.1,"momentum":0.9}}), dict(optimizer={"type":"RMSprop","params":{"lr":0.1}})])
@pytest.mark.parametrize("ref", ["plain","stage0"])
def test_it(ranks, tmp_path, changes, ref):
    dtype = "bfloat16" if "bf16" in changes else "float16" if "fp16" in changes else "float32"
    a = ranks(run, "configured", str(tmp_path), changes, dtype, world_size=2)
    b = ranks(run, ref, str(tmp_path), changes, dtype, world_size=2)
    print(a, b)
    result = compare(str(tmp_path), ref)
    print(*lines_of(result, ref), sep="\n")
    assert result.difference is None
