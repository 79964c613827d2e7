"""Casts of autocast, which torch makes for tensors of devices that it knows, and not for meta tensors.

[Note: autocast without values]
torch has a kernel for each operation on its lists, below a dispatch key of the device's. Here the key is
there for all tensors, and the kernels of these lists are replaced by ones in Python that ask a tensor without
values for the device that it is said to be on. torch leaves the key out wherever autocast is off.

Source: torch's ATen/autocast_mode.h and autocast_mode.cpp, the lists of CUDA and of CPUs
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
_LOWER = """
_convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm
baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell
rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention _scaled_dot_product_flash_attention
"""
_FP32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar
pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim
nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d
hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d
_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d
_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa
"""
_RESULT_FP32 = """
prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
linalg_matrix_norm.str_ord sum sum.dim_IntList
"""
_WIDEST = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
"""
_NORMS = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
_LOWER_ON_CPU = """
conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding bmm mm linalg_vecdot baddbmm addmm addbmm
linear _convolution.deprecated matmul conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
prelu scaled_dot_product_attention
"""
_FP32_ON_CPU = """
avg_pool3d binary_cross_entropy grid_sampler polar prod prod.dim_int quantile quantile.scalar nanquantile
nanquantile.scalar cdist grid_sampler_2d grid_sampler_3d trace view_as_complex cholesky cholesky_inverse
cholesky_solve inverse pinverse max_pool3d adaptive_avg_pool3d reflection_pad1d reflection_pad2d
replication_pad1d replication_pad2d replication_pad3d mse_loss cosine_embedding_loss nll_loss nll_loss2d
hinge_embedding_loss poisson_nll_loss smooth_l1_loss cross_entropy_loss l1_loss huber_loss margin_ranking_loss
soft_margin_loss triplet_margin_loss multi_margin_loss ctc_loss.IntList ctc_loss.Tensor kl_div
multilabel_margin_loss binary_cross_entropy_with_logits linalg_vector_norm linalg_matrix_norm
"""
_WIDEST_ON_CPU = "stack cat index_copy"
_LIBRARIES: list[Any] = []  # whose end would take the kernels away


class _Lists(NamedTuple):
    """The operations that autocast casts on one kind of device, by what they are cast to."""

    key: str  # torch's dispatch key
    lower: str
    fp32: str
    result_fp32: str
    widest: str
    norms: Mapping[str, str]  # their results are fp32, by another overload


_LISTS = {
    "cuda": _Lists("AutocastCUDA", _LOWER, _FP32, _RESULT_FP32, _WIDEST, _NORMS),
    "cpu": _Lists("AutocastCPU", _LOWER_ON_CPU, _FP32_ON_CPU, "", _WIDEST_ON_CPU, {}),
}


def cast_as_autocast() -> None:
    """Have torch's autocast see tensors without values, in this process."""
    for device_type in _LISTS:
        Autocast(device_type).put()
    cast_in_this_thread()


def cast_in_this_thread() -> None:
    """Have it see them in this thread: each has its own dispatch keys."""
    for lists in _LISTS.values():
        torch._C._dispatch_tls_set_dispatch_key_included(lists.key, True)


class Autocast:
    """The casts of one kind of device; casts of parameters are kept until the outermost block ends."""

    def __init__(self, device_type: str) -> None:
        self._device_type, self._lists = device_type, _LISTS[device_type]
        self._kept: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self._keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, self._lists.key))

    def put(self) -> None:
        """Replace the kernels."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of kernels that are replaced, as they should be
            self._replace_kernels()
        clear = torch.clear_autocast_cache

        def clear_all() -> None:
            self._kept.clear()
            clear()

        torch.clear_autocast_cache = clear_all

    def _replace_kernels(self) -> None:
        lists = self._lists
        library: Any = torch.library.Library("aten", "IMPL", lists.key)  # type: ignore[no-untyped-call]
        _LIBRARIES.append(library)
        for names, prepare in (
            (lists.lower, self._lowered),
            (lists.fp32, self._in_fp32),
            (lists.result_fp32, self._result_in_fp32),
            (lists.widest, self._widest),
        ):
            for name in names.split():
                func = _operation(name)
                library.impl(func, self._kernel(func, prepare), allow_override=True)
        for name, with_dtype in lists.norms.items():
            kernel = self._norm(_operation(name), _operation(with_dtype))
            library.impl(_operation(name), kernel, allow_override=True)

    def _kernel(self, func: Any, prepare: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self._keys):
                args, kwargs = prepare(func, args, kwargs)
                return func(*args, **kwargs)

        return run

    def _norm(self, func: Any, with_dtype: Any) -> Callable[..., Any]:
        def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(self._keys):
                if not self.is_cast(tensor):
                    return func(tensor, *args, **kwargs)
                if func is aten.norm.Scalar:
                    args = args or (kwargs.pop("p", 2),)
                return with_dtype(tensor, *args, **kwargs, dtype=torch.float32)

        return run

    def is_cast(self, value: Any) -> bool:
        """Whether autocast changes the dtype of such a value."""
        return (
            isinstance(value, Tensor)
            and value.is_floating_point()
            and value.dtype is not torch.float64
            and value.device.type == self._device_type
        )

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the tensor in that dtype; the cast of a parameter is kept."""
        if not self.is_cast(tensor) or tensor.dtype is dtype:
            return tensor
        is_kept = (
            torch.is_autocast_cache_enabled()
            and dtype is torch.get_autocast_dtype(self._device_type)
            and tensor.dtype is torch.float32
            and tensor.requires_grad
            and tensor.is_leaf
            and not tensor._is_view()
        )
        if not is_kept:
            return tensor.to(dtype)
        found = self._kept.get(id(tensor))
        if found is not None and found[0]() is tensor:
            return found[1]
        made = tensor.to(dtype)
        self._kept[id(tensor)] = (weakref.ref(tensor), made)
        return made

    def _lowered(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._all_as(args, kwargs, torch.get_autocast_dtype(self._device_type))

    def _in_fp32(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._all_as(args, kwargs, torch.float32)

    def _result_in_fp32(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        place = next(at for at, one in enumerate(func._schema.arguments) if one.name == "dtype")
        given = args[place] if place < len(args) else kwargs.get("dtype")
        if self.is_cast(args[0]) and given is None:
            return args[:place], {**kwargs, "dtype": torch.float32}
        return args, kwargs

    def _widest(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = [one for one in _flat(args) if self.is_cast(one)]
        is_wide = any(one.dtype is torch.float32 for one in given)
        dtype = torch.float32 if is_wide else torch.get_autocast_dtype(self._device_type)
        return self._all_as(args, kwargs, dtype)

    def _all_as(self, args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
        def cast(value: Any) -> Any:
            if isinstance(value, Tensor):
                return self.cast(value, dtype)
            if isinstance(value, (list, tuple)):
                return type(value)(cast(one) for one in value)
            return value

        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


def _flat(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in _flat(one)]
    return [value]
