"""The complete list of operators that an artefact may contain; others are neither saved nor loaded.

On the list: ATen operators that compute tensors or sizes from tensors and sizes, and in-place forms of
some of them (capture keeps a mutation where it can't prove that nobody else looks at the tensor).
Not on it, and not to be added: what reads or writes files, draws random numbers, changes a tensor's storage
or trusts its arguments without a bounds check (`_reshape_alias`, `_unsafe_index`, `lu_solve`,
`segment_reduce`), gradients, other devices, sparse, nested and already quantized tensors.

The lists are data, reviewed by eye; test_artefact.py holds them against the operators' schemas.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import torch

from nc import ops
from nc.errors import ArtefactOperatorError

#: Arithmetic on sizes, and access to one of several outputs.
_PYTHON: dict[str, Callable[..., object]] = {
    "operator.getitem": operator.getitem,
    "operator.add": operator.add,
    "operator.sub": operator.sub,
    "operator.mul": operator.mul,
    "operator.floordiv": operator.floordiv,
    "operator.truediv": operator.truediv,
    "operator.mod": operator.mod,
    "operator.pow": operator.pow,
    "operator.neg": operator.neg,
    "operator.pos": operator.pos,
    "operator.eq": operator.eq,
    "operator.ne": operator.ne,
    "operator.lt": operator.lt,
    "operator.le": operator.le,
    "operator.gt": operator.gt,
    "operator.ge": operator.ge,
    "operator.and_": operator.and_,
    "operator.or_": operator.or_,
    "torch.sym_max": torch.sym_max,
    "torch.sym_min": torch.sym_min,
    "torch.sym_float": torch.sym_float,
    "torch.sym_int": torch.sym_int,
    "torch.sym_not": torch.sym_not,
    "torch.sym_ite": torch.sym_ite,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.trunc": math.trunc,
}

_GENERAL = """
__and__.Scalar __and__.Tensor __lshift__.Scalar __lshift__.Tensor __or__.Scalar __or__.Tensor
__rshift__.Scalar __rshift__.Tensor __xor__.Scalar __xor__.Tensor _adaptive_avg_pool2d.default
_adaptive_avg_pool3d.default _aminmax.default _aminmax.dim _cdist_forward.default _conj.default
_convolution.default _convolution_mode.default _local_scalar_dense.default _log_softmax.default
_native_batch_norm_legit.no_stats _native_batch_norm_legit_no_training.default _neg_view.default
_pack_padded_sequence.default _pad_circular.default _pad_enum.default _pad_packed_sequence.default
_prelu_kernel.default _safe_softmax.default _shape_as_tensor.default _softmax.default _to_copy.default
_trilinear.default _unique.default _unique2.default _unsafe_view.default _upsample_bicubic2d_aa.default
_upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.default _upsample_bilinear2d_aa.vec
_upsample_nearest_exact1d.default _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.default
_upsample_nearest_exact2d.vec _upsample_nearest_exact3d.default _upsample_nearest_exact3d.vec
_weight_norm.default _weight_norm_interface.default abs.default absolute.default acos.default
acosh.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default
adaptive_max_pool1d.default adaptive_max_pool2d.default adaptive_max_pool3d.default add.Scalar add.Tensor
addbmm.default addcdiv.default addcmul.default addmm.default addmm.dtype addmv.default addr.default
adjoint.default affine_grid_generator.default all.default all.dim all.dims allclose.default amax.default
amin.default aminmax.default angle.default any.default any.dim any.dims arange.default arange.start
arange.start_step arccos.default arccosh.default arcsin.default arcsinh.default arctan.default
arctan2.default arctanh.default argmax.default argmin.default argsort.default argsort.stable
argwhere.default as_strided.default as_strided_scatter.default asin.default asinh.default atan.default
atan2.default atanh.default atleast_1d.Sequence atleast_1d.default atleast_2d.Sequence atleast_2d.default
atleast_3d.Sequence atleast_3d.default avg_pool1d.default avg_pool2d.default avg_pool3d.default
baddbmm.default baddbmm.dtype bartlett_window.default bartlett_window.periodic batch_norm.default
bilinear.default binary_cross_entropy.default binary_cross_entropy_with_logits.default bincount.default
bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_and.Tensor bitwise_left_shift.Scalar_Tensor
bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_not.default bitwise_or.Scalar
bitwise_or.Scalar_Tensor bitwise_or.Tensor bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor
bitwise_right_shift.Tensor_Scalar bitwise_xor.Scalar bitwise_xor.Scalar_Tensor bitwise_xor.Tensor
blackman_window.default blackman_window.periodic block_diag.default bmm.default bmm.dtype
broadcast_tensors.default broadcast_to.default bucketize.Scalar bucketize.Tensor cartesian_prod.default
cat.default cdist.default ceil.default celu.default chain_matmul.default channel_shuffle.default
cholesky.default cholesky_inverse.default cholesky_solve.default chunk.default clamp.Tensor clamp.default
clamp_max.Tensor clamp_max.default clamp_min.Tensor clamp_min.default clip.Tensor clip.default
clone.default col2im.default column_stack.default combinations.default complex.default concat.default
concatenate.default conj.default conj_physical.default constant_pad_nd.default contiguous.default
conv1d.default conv1d.padding conv2d.default conv2d.padding conv3d.default conv3d.padding
conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input convolution.default copy.default
copysign.Scalar copysign.Tensor corrcoef.default cos.default cosh.default cosine_embedding_loss.default
cosine_similarity.default count_nonzero.default count_nonzero.dim_IntList cov.default cross.default
cross_entropy_loss.default cummax.default cummin.default cumprod.default cumsum.default
cumulative_trapezoid.dx cumulative_trapezoid.x deg2rad.default det.default diag.default diag_embed.default
diagflat.default diagonal.default diagonal_scatter.default diff.default digamma.default dist.default
div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode divide.Scalar divide.Scalar_mode divide.Tensor
divide.Tensor_mode dot.default dsplit.array dsplit.int dstack.default einsum.default elu.default
embedding.default embedding_bag.default embedding_bag.padding_idx empty.memory_format empty_like.default
empty_permuted.default empty_strided.default eq.Scalar eq.Tensor equal.default erf.default erfc.default
erfinv.default exp.default exp2.default expand.default expand_as.default expm1.default eye.default eye.m
fill.Scalar fill.Tensor fix.default flatten.using_ints flip.default fliplr.default flipud.default
float_power.Scalar float_power.Tensor_Scalar float_power.Tensor_Tensor floor.default floor_divide.Scalar
floor_divide.default fmax.default fmin.default fmod.Scalar fmod.Tensor frac.default frexp.Tensor
frobenius_norm.dim full.default full_like.default gather.default gcd.default ge.Scalar ge.Tensor
gelu.default geqrf.default ger.default glu.default gradient.array gradient.scalararray gradient.scalarint
gradient.scalarrayarray gradient.scalarrayint gradient.tensorarray gradient.tensorarrayint greater.Scalar
greater.Tensor greater_equal.Scalar greater_equal.Tensor grid_sampler.default grid_sampler_2d.default
grid_sampler_3d.default group_norm.default gru.data gru.input gru_cell.default gt.Scalar gt.Tensor
hamming_window.default hamming_window.periodic hamming_window.periodic_alpha
hamming_window.periodic_alpha_beta hann_window.default hann_window.periodic hardshrink.default
hardsigmoid.default hardswish.default hardtanh.default heaviside.default hinge_embedding_loss.default
histc.default histogram.bin_ct histogram.bins_tensor histogramdd.TensorList_bins histogramdd.default
histogramdd.int_bins hsplit.array hsplit.int hstack.default huber_loss.default hypot.default i0.default
igamma.default igammac.default im2col.default imag.default index.Tensor index_add.default
index_copy.default index_fill.int_Scalar index_fill.int_Tensor index_put.default index_reduce.default
index_select.default inner.default instance_norm.default inverse.default isclose.default isfinite.default
isin.Scalar_Tensor isin.Tensor_Scalar isin.Tensor_Tensor isinf.default isnan.default isneginf.default
isposinf.default isreal.default istft.default item.default kaiser_window.beta kaiser_window.default
kaiser_window.periodic kl_div.default kron.default kthvalue.default l1_loss.default layer_norm.default
lcm.default ldexp.Tensor le.Scalar le.Tensor leaky_relu.default lerp.Scalar lerp.Tensor less.Scalar
less.Tensor less_equal.Scalar less_equal.Tensor lgamma.default linear.default linspace.Scalar_Tensor
linspace.Tensor_Scalar linspace.Tensor_Tensor linspace.default log.default log10.default log1p.default
log2.default log_sigmoid.default log_softmax.int logaddexp.default logaddexp2.default logcumsumexp.default
logdet.default logical_and.default logical_not.default logical_or.default logical_xor.default
logit.default logspace.Scalar_Tensor logspace.Tensor_Scalar logspace.Tensor_Tensor logspace.default
logsumexp.default lstm.data lstm.input lstm_cell.default lt.Scalar lt.Tensor mH.default mT.default
margin_ranking_loss.default masked_fill.Scalar masked_fill.Tensor masked_scatter.default
masked_select.default matmul.default matrix_H.default matrix_exp.default matrix_power.default max.default
max.dim max.other max_pool1d.default max_pool1d_with_indices.default max_pool2d.default
max_pool2d_with_indices.default max_pool3d.default max_pool3d_with_indices.default max_unpool2d.default
max_unpool3d.default maximum.default mean.default mean.dim median.default median.dim meshgrid.default
meshgrid.indexing min.default min.dim min.other minimum.default mish.default mm.default mm.dtype
mode.default moveaxis.int moveaxis.intlist movedim.int movedim.intlist mse_loss.default msort.default
mul.Scalar mul.Tensor multi_margin_loss.default multiply.Scalar multiply.Tensor mv.default
mvlgamma.default nan_to_num.default nanmean.default nanmedian.default nanmedian.dim nanquantile.default
nanquantile.scalar nansum.default narrow.Tensor narrow.default native_batch_norm.default
native_channel_shuffle.default native_group_norm.default native_layer_norm.default ne.Scalar ne.Tensor
neg.default negative.default new_empty.default new_empty_strided.default new_full.default new_ones.default
new_zeros.default nextafter.default nll_loss.default nll_loss_nd.default nonzero.default
nonzero_static.default norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype
not_equal.Scalar not_equal.Tensor nuclear_norm.default nuclear_norm.dim numpy_T.default one_hot.default
ones.default ones_like.default orgqr.default ormqr.default outer.default pad.default pad_sequence.default
pairwise_distance.default pdist.default permute.default pinverse.default pixel_shuffle.default
pixel_unshuffle.default poisson_nll_loss.default polar.default polygamma.default positive.default
pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor prelu.default prod.default prod.dim_int put.default
qr.default quantile.default quantile.scalar rad2deg.default ravel.default real.default reciprocal.default
reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default relu.default relu6.default
remainder.Scalar remainder.Scalar_Tensor remainder.Tensor renorm.default repeat.default
repeat_interleave.Tensor repeat_interleave.self_Tensor repeat_interleave.self_int
replication_pad1d.default replication_pad2d.default replication_pad3d.default reshape.default
reshape_as.default resolve_conj.default resolve_neg.default rms_norm.default rnn_relu.data rnn_relu.input
rnn_relu_cell.default rnn_tanh.data rnn_tanh.input rnn_tanh_cell.default roll.default rot90.default
round.decimals round.default row_stack.default rrelu.default rsqrt.default rsub.Scalar rsub.Tensor
scalar_tensor.default scaled_dot_product_attention.default scatter.reduce scatter.src scatter.value
scatter.value_reduce scatter_add.default scatter_reduce.two searchsorted.Scalar searchsorted.Tensor
select.int select_scatter.default selu.default sgn.default sigmoid.default sign.default signbit.default
silu.default sin.default sinc.default sinh.default slice.Tensor slice_scatter.default slogdet.default
smooth_l1_loss.default soft_margin_loss.default softmax.int softplus.default softshrink.default
sort.default sort.stable split.Tensor split.sizes split_with_sizes.default sqrt.default square.default
squeeze.default squeeze.dim squeeze.dims stack.default std.correction std.default std.dim
std_mean.correction std_mean.default std_mean.dim stft.center stft.default sub.Scalar sub.Tensor
subtract.Scalar subtract.Tensor sum.default sum.dim_IntList svd.default swapaxes.default swapdims.default
sym_numel.default sym_size.int sym_storage_offset.default sym_stride.int t.default take.default
take_along_dim.default tan.default tanh.default tensor_split.indices tensor_split.sections
tensor_split.tensor_indices_or_sections tensordot.default threshold.default tile.default to.device
to.dtype to.dtype_layout to.other topk.default trace.default transpose.int trapezoid.dx trapezoid.x
trapz.dx trapz.x triangular_solve.default tril.default tril_indices.default triplet_margin_loss.default
triu.default triu_indices.default true_divide.Scalar true_divide.Tensor trunc.default type_as.default
unbind.int unflatten.int unfold.default unique_consecutive.default unique_dim.default
unique_dim_consecutive.default unsafe_chunk.default unsafe_split.Tensor unsafe_split_with_sizes.default
unsqueeze.default upsample_bicubic2d.default upsample_bicubic2d.vec upsample_bilinear2d.default
upsample_bilinear2d.vec upsample_linear1d.default upsample_linear1d.vec upsample_nearest1d.default
upsample_nearest1d.vec upsample_nearest2d.default upsample_nearest2d.vec upsample_nearest3d.default
upsample_nearest3d.vec upsample_trilinear3d.default upsample_trilinear3d.vec vander.default var.correction
var.default var.dim var_mean.correction var_mean.default var_mean.dim vdot.default view.default view.dtype
view_as.default view_as_complex.default view_as_real.default vsplit.array vsplit.int vstack.default
where.Scalar where.ScalarOther where.ScalarSelf where.default where.self xlogy.Scalar_Other
xlogy.Scalar_Self xlogy.Tensor zero.default zeros.default zeros_like.default
"""
_FFT = """
_fft_c2c.default _fft_c2r.default _fft_r2c.default fft_fft.default fft_fft2.default fft_fftfreq.default
fft_fftn.default fft_fftshift.default fft_hfft.default fft_hfft2.default fft_hfftn.default
fft_ifft.default fft_ifft2.default fft_ifftn.default fft_ifftshift.default fft_ihfft.default
fft_ihfft2.default fft_ihfftn.default fft_irfft.default fft_irfft2.default fft_irfftn.default
fft_rfft.default fft_rfft2.default fft_rfftfreq.default fft_rfftn.default
"""
_LINALG = """
linalg_cholesky.default linalg_cholesky_ex.default linalg_cond.default linalg_cond.p_str
linalg_cross.default linalg_det.default linalg_diagonal.default linalg_eig.default linalg_eigh.default
linalg_eigvals.default linalg_eigvalsh.default linalg_householder_product.default linalg_inv.default
linalg_inv_ex.default linalg_lstsq.default linalg_lu.default linalg_lu_factor.default
linalg_lu_factor_ex.default linalg_matmul.default linalg_matrix_exp.default linalg_matrix_norm.default
linalg_matrix_norm.str_ord linalg_matrix_power.default linalg_matrix_rank.atol_rtol_float
linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.default linalg_matrix_rank.tol_tensor
linalg_multi_dot.default linalg_norm.default linalg_norm.ord_str linalg_pinv.atol_rtol_float
linalg_pinv.atol_rtol_tensor linalg_pinv.default linalg_pinv.rcond_tensor linalg_qr.default
linalg_slogdet.default linalg_solve.default linalg_solve_ex.default linalg_solve_triangular.default
linalg_svd.default linalg_svdvals.default linalg_tensorinv.default linalg_tensorsolve.default
linalg_vander.default linalg_vecdot.default linalg_vector_norm.default
"""
_SPECIAL = """
special_bessel_j0.default special_bessel_j1.default special_digamma.default special_entr.default
special_erf.default special_erfc.default special_erfcx.default special_erfinv.default special_exp2.default
special_expit.default special_expm1.default special_gammainc.default special_gammaincc.default
special_gammaln.default special_i0.default special_i0e.default special_i1.default special_i1e.default
special_log1p.default special_log_ndtr.default special_log_softmax.default special_logit.default
special_logsumexp.default special_multigammaln.default special_ndtr.default special_ndtri.default
special_polygamma.default special_psi.default special_round.default special_sinc.default
special_softmax.default special_xlog1py.default special_xlog1py.other_scalar special_xlog1py.self_scalar
special_xlogy.default special_xlogy.other_scalar special_xlogy.self_scalar special_zeta.default
special_zeta.other_scalar special_zeta.self_scalar
"""
_IN_PLACE = """
abs_.default absolute_.default acos_.default acosh_.default add_.Scalar add_.Tensor addbmm_.default
addcdiv_.default addcmul_.default addmm_.default addmv_.default addr_.default arccos_.default
arccosh_.default arcsin_.default arcsinh_.default arctan2_.default arctan_.default arctanh_.default
asin_.default asinh_.default atan2_.default atan_.default atanh_.default baddbmm_.default
bitwise_and_.Scalar bitwise_and_.Tensor bitwise_left_shift_.Tensor bitwise_left_shift_.Tensor_Scalar
bitwise_not_.default bitwise_or_.Scalar bitwise_or_.Tensor bitwise_right_shift_.Tensor
bitwise_right_shift_.Tensor_Scalar bitwise_xor_.Scalar bitwise_xor_.Tensor ceil_.default celu_.default
clamp_.Tensor clamp_.default clamp_max_.Tensor clamp_max_.default clamp_min_.Tensor clamp_min_.default
clip_.Tensor clip_.default conj_physical_.default copy_.default copysign_.Scalar copysign_.Tensor
cos_.default cosh_.default cumprod_.default cumsum_.default deg2rad_.default digamma_.default div_.Scalar
div_.Scalar_mode div_.Tensor div_.Tensor_mode divide_.Scalar divide_.Scalar_mode divide_.Tensor
divide_.Tensor_mode elu_.default eq_.Scalar eq_.Tensor erf_.default erfc_.default erfinv_.default
exp2_.default exp_.default expm1_.default fill_.Scalar fill_.Tensor fix_.default floor_.default
floor_divide_.Scalar floor_divide_.Tensor fmod_.Scalar fmod_.Tensor frac_.default gcd_.default ge_.Scalar
ge_.Tensor gelu_.default greater_.Scalar greater_.Tensor greater_equal_.Scalar greater_equal_.Tensor
gt_.Scalar gt_.Tensor hardsigmoid_.default hardswish_.default hardtanh_.default heaviside_.default
hypot_.default i0_.default igamma_.default igammac_.default index_add_.default index_copy_.default
index_fill_.int_Scalar index_fill_.int_Tensor index_put_.default index_reduce_.default lcm_.default
le_.Scalar le_.Tensor leaky_relu_.default lerp_.Scalar lerp_.Tensor less_.Scalar less_.Tensor
less_equal_.Scalar less_equal_.Tensor lgamma_.default log10_.default log1p_.default log2_.default
log_.default logical_and_.default logical_not_.default logical_or_.default logical_xor_.default
logit_.default lt_.Scalar lt_.Tensor masked_fill_.Scalar masked_fill_.Tensor masked_scatter_.default
mish_.default mul_.Scalar mul_.Tensor multiply_.Scalar multiply_.Tensor mvlgamma_.default
nan_to_num_.default ne_.Scalar ne_.Tensor neg_.default negative_.default nextafter_.default
not_equal_.Scalar not_equal_.Tensor polygamma_.default pow_.Scalar pow_.Tensor put_.default
rad2deg_.default reciprocal_.default relu6_.default relu_.default remainder_.Scalar remainder_.Tensor
round_.decimals round_.default rsqrt_.default scatter_.reduce scatter_.src scatter_.value
scatter_.value_reduce scatter_add_.default scatter_reduce_.two selu_.default sigmoid_.default
sign_.default silu_.default sin_.default sinc_.default sinh_.default sqrt_.default square_.default
sub_.Scalar sub_.Tensor subtract_.Scalar subtract_.Tensor tan_.default tanh_.default threshold_.default
tril_.default triu_.default true_divide_.Scalar true_divide_.Tensor trunc_.default xlogy_.Scalar_Other
xlogy_.Tensor zero_.default
"""

_NAMES = {function: name for name, function in _PYTHON.items()}
_ATEN = " ".join((_GENERAL, _FFT, _LINALG, _SPECIAL, _IN_PLACE)).split()

#: Every name on the list as artefacts spell it: "aten.linear.default", "operator.add",
#: "nc.dequantize_per_tensor.default".
OPERATORS = frozenset((*_PYTHON, *(f"aten.{name}" for name in _ATEN), *map(str, ops.REFERENCE)))


def name_of(target: Callable[..., object], node: str) -> str:
    """Return the listed name of what a node calls.

    Args:
        target: the operator.
        node: name of the node, for the message.

    Raises:
        ArtefactOperatorError: it is not on the list.
    """
    name = _NAMES.get(target)
    if name is None:
        name = str(target)
        if name not in OPERATORS or not isinstance(target, torch._ops.OpOverload):
            raise ArtefactOperatorError(_message(name, node))
    return name


def check(name: str, node: str) -> None:
    """Raise ArtefactOperatorError unless `name` is on the list; `node` is where it was found."""
    if name not in OPERATORS:
        raise ArtefactOperatorError(_message(name, node))


def resolve(name: str, node: str) -> Callable[..., object]:
    """Return what a listed name calls.

    Raises:
        ArtefactOperatorError: the name is not on the list, or this version of torch has no such operator.
    """
    check(name, node)
    if name in _PYTHON:
        return _PYTHON[name]
    namespace, packet, overload = name.split(".")
    operators = getattr(torch.ops, namespace)
    if not (hasattr(operators, packet) and hasattr(getattr(operators, packet), overload)):
        msg = (
            f"Node {node!r}: torch {torch.__version__} has no operator {name!r}; use the version that "
            "wrote the artefact (model.json names it)."
        )
        raise ArtefactOperatorError(msg)
    found: Callable[..., object] = getattr(getattr(operators, packet), overload)
    return found


def _message(name: str, node: str) -> str:
    return (
        f"Node {node!r}: operator {name!r} is not on the list of operators that an artefact may hold "
        "(nc/storage/allowlist.py). A model that needs it runs where it was converted, but can't be saved or "
        "loaded: write it with torch's own functional operators."
    )
