def adamw_step(
    param: object,
    grad: object,
    exp_avg: object,
    exp_avg_sq: object,
    segments: object,
    *,
    grad_scale: float,
    adam_w_mode: bool,
    param_out: object | None,
    num_threads: int,
) -> None: ...
def adamw_step_reference(
    param: object,
    grad: object,
    exp_avg: object,
    exp_avg_sq: object,
    segments: object,
    *,
    grad_scale: float,
    adam_w_mode: bool,
    param_out: object | None,
) -> None: ...
def squared_norm(grad: object, *, num_threads: int) -> float: ...
