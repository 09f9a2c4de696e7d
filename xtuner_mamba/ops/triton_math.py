"""Functions that the kernels share, good to about one rounding of float32.

Step sizes live between 0.001 and 0.1. There a hardware logarithm of ``1 + exp(v)`` keeps half of
float32's digits, ``1 - exp(-dt)`` few more, and an exponent rounded before ``exp2`` loses two bits.
"""

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts, the first so short that its product with an exponent is exact
_LN_2_HIGH = tl.constexpr(0.693145751953125)
_LN_2_LOW = tl.constexpr(1.428606765330187e-06)
# added to a small number, 1.5 * 2**23 leaves its integer in the low bits; 127 is the bias of an
# exponent in float32
_TO_EXPONENT = tl.constexpr(12582912.0 + 127.0)
# what is compiled is for NVIDIA, unless PyTorch is for AMD; the interpreter knows no assembly
_HAS_PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)


@triton.jit
def step_size(b_v, SOFTPLUS: tl.constexpr):
    """Return the step size that v stands for, and its derivative in v."""
    if SOFTPLUS:
        b_exp = _exp_of_negative(-tl.abs(b_v))
        # (log(1 + e) - e) / e^2 on [0, 1], so fitted that the logarithm is good to 5e-9
        b_log = 0.02020457200706005 - 0.003318469738587737 * b_exp
        b_log = -0.0576644204556942 + b_log * b_exp
        b_log = 0.10680553317070007 + b_log * b_exp
        b_log = -0.15355394780635834 + b_log * b_exp
        b_log = 0.19695399701595306 + b_log * b_exp
        b_log = -0.24958586692810059 + b_log * b_exp
        b_log = 0.33330512046813965 + b_log * b_exp
        b_log = -0.4999993145465851 + b_log * b_exp
        b_log = b_exp + b_exp * (b_exp * b_log)
        b_slope = tl.where(b_v > 0, 1.0, b_exp) / (1.0 + b_exp)
        b_step = tl.where(b_v > 0, b_v, 0.0) + b_log
    else:
        b_slope = tl.full(b_v.shape, 1.0, tl.float32)
        b_step = b_v
    return b_step, b_slope


@triton.jit
def silu(b_v):
    """Return v / (1 + exp(-v))."""
    return b_v * sigmoid(b_v)


@triton.jit
def sigmoid(b_v):
    """Return 1 / (1 + exp(-v))."""
    return _reciprocal(1.0 + tl.exp2(b_v * -LOG2_E))


@triton.jit
def _reciprocal(b_v):
    """Return 1 / v; 0 where that would be too small to be a normal number."""
    if _HAS_PTX:
        # one instruction, good to a unit in the last place; a division takes five, good to two
        b_v = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [b_v], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        b_v = 1.0 / b_v
    return b_v


@triton.jit
def _exp_of_negative(b_v):
    # float32 has no normal numbers further down; unlike a maximum, the comparison keeps NaN
    b_v = tl.where(b_v < -87.0, -87.0, b_v)
    b_shifted = b_v * LOG2_E + _TO_EXPONENT
    b_whole = b_shifted - _TO_EXPONENT
    b_r = b_v - b_whole * _LN_2_HIGH - b_whole * _LN_2_LOW
    # (exp(r) - 1 - r) / r^2 for |r| <= log(2) / 2, so fitted that exp is good to 3e-9
    b_exp = 0.00836885068565607 + 0.0013814320554956794 * b_r
    b_exp = 0.041668400168418884 + b_exp * b_r
    b_exp = 0.1666651964187622 + b_exp * b_r
    b_exp = 0.4999999403953552 + b_exp * b_r
    b_exp = 1.0 + (b_r + b_r * (b_r * b_exp))
    return b_exp * (b_shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)


@triton.jit
def add_compensated(b_sum, b_rest, b_v):
    """Add v to a sum and return both it and what rounding added too much (Kahan's method)."""
    b_v -= b_rest
    b_new = b_sum + b_v
    return b_new, (b_new - b_sum) - b_v


@triton.jit
def sum_rows(p_first, m, num_rows, stride, ROWS: tl.constexpr):
    """Sum the numbers from each pointer on, ``stride`` apart, in ``ROWS`` chains."""
    o_row = tl.arange(0, ROWS)
    b_sums = tl.zeros((ROWS, p_first.shape[0]), dtype=tl.float32)
    for i_row in range(0, num_rows, ROWS):
        m_row = (i_row + o_row < num_rows)[:, None] & m[None, :]
        p_row = p_first[None, :] + (i_row + o_row).to(tl.int64)[:, None] * stride
        b_sums += tl.load(p_row, mask=m_row, other=0.0)
    return tl.sum(b_sums, 0)
