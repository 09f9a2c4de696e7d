"""Functions of one value that the kernels on the CPU share, good to about one rounding.

They are branchless, so that the compiler turns a loop over them into vector instructions. One
definition serves float32 and float64.
"""

import math

import numpy as np
from numba import float32
from numba.extending import intrinsic, overload

CALLED = dict(nogil=True, error_model="numpy", fastmath={"contract"})
"""Options of all compiled code: results may fuse a product and a sum, and take no other liberty."""

INLINED = CALLED | dict(forceinline=True)
"""Options of a function that kernels call in a loop: a true call would keep it from vectors."""


def exp2(t):
    """Return 2 to the power of t; numbers too small to be normal are 0."""
    raise NotImplementedError


@overload(exp2, jit_options=INLINED)
def _compile_exp2(t):
    if t == float32:
        real, bits, shift, lowest, highest = np.float32, np.int32, 23, -126, 128
        # value and slope at 0 are exact, the rest is so fitted that 2**t is good to 3e-9
        fitted = (0.2402264755, 0.05550362252, 0.009618526306, 0.001339016194, 0.0001532115577)
        coefficients = [1, math.log(2), *fitted]
    else:
        real, bits, shift, lowest, highest = np.float64, np.int64, 52, -1022, 1024
        coefficients = [math.log(2) ** k / math.factorial(k) for k in range(14)]
    low, zero, high, shift = real(lowest), real(lowest - 1), real(highest), bits(shift)
    # adding it leaves the nearest integer in the lowest bits
    round_to_int = real(1.5 * 2.0 ** int(shift))
    series = _polynomial(coefficients)

    def compiled(t):
        t = zero if t < low else t
        t = high if t > high else t
        rounded = t + round_to_int
        power = series(t - (rounded - round_to_int))
        exponent = bits(real(rounded).view(bits) << shift)
        value = bits(real(power).view(bits) + exponent).view(real)
        # the low bits of a NaN would have made a number of it
        return value if t == t else t

    return compiled


def sigmoid(v):
    """Return 1 / (1 + exp(-v))."""
    raise NotImplementedError


@overload(sigmoid, jit_options=INLINED)
def _compile_sigmoid(v):
    real = _real_of(v)
    one, minus_log2_e = real(1), real(-math.log2(math.e))
    return lambda v: one / (one + exp2(v * minus_log2_e))


def silu(v):
    """Return v / (1 + exp(-v))."""
    raise NotImplementedError


@overload(silu, jit_options=INLINED)
def _compile_silu(v):
    return lambda v: v * sigmoid(v)


def silu_slope(v):
    """Return the derivative of silu."""
    raise NotImplementedError


@overload(silu_slope, jit_options=INLINED)
def _compile_silu_slope(v):
    one = _real_of(v)(1)

    def compiled(v):
        gate = sigmoid(v)
        return gate * (one + v * (one - gate))

    return compiled


def softplus(v):
    """Return log(1 + exp(v))."""
    raise NotImplementedError


@overload(softplus, jit_options=INLINED)
def _compile_softplus(v):
    real = _real_of(v)
    zero, two, minus_log2_e = real(0), real(2), real(-math.log2(math.e))
    series = _polynomial([2 / (2 * k + 1) for k in range(7 if real is np.float32 else 16)])

    def compiled(v):
        size = abs(v)
        e = exp2(size * minus_log2_e)
        # log(1 + e) as the series of 2 artanh(ratio)
        ratio = e / (two + e)
        return (v if v > zero else zero) + ratio * series(ratio * ratio)

    return compiled


def _real_of(v):
    return np.float32 if v == float32 else np.float64


def _polynomial(coefficients):
    """Return a function that evaluates a polynomial, lowest power first, without a loop.

    The compiler would unroll a loop too late to vectorise what stands around it.
    """

    @intrinsic
    def polynomial(typing_context, v):
        def emit(context, builder, signature, arguments):
            (v,) = arguments
            *rest, total = (v.type(c) for c in coefficients)
            for c in reversed(rest):
                scaled = builder.fmul(v, total, flags=["contract"])
                total = builder.fadd(c, scaled, flags=["contract"])
            return total

        return v(v), emit

    return polynomial
