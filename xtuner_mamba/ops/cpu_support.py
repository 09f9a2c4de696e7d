"""How the kernels on the CPU take tensors, and the threads they run on.

A kernel walks all tokens of a block of ``LANES`` channels, a few tokens at a time: their rows are
copied into tiles, ``(tokens, LANES)``, whose loops the compiler turns into vector instructions.
Lanes beyond the channels hold zeros.
"""

import ctypes
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import ceil

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.cgutils import get_or_insert_function, voidptr_t
from numba.extending import intrinsic
from numba.np.arrayobj import make_array
from torch import Tensor

from xtuner_mamba.ops.cpu_math import CALLED

LANES = 128

_logger = logging.getLogger(__name__)

Rows = tuple[np.ndarray, int]
"""The memory that rows lie in, as a flat array, and the way from one row to the next."""


def compile_kernel(function: Callable) -> Callable:
    """Compile a kernel at its first call in a dtype, once a machine.

    What was compiled is kept as long as the kernel's own file does not change: after a change of
    another file that it uses, delete the ``__pycache__`` beside it.
    """
    try:
        return njit(cache=True, **CALLED)(function)
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        _logger.warning(
            "NUMBA_CACHE_DIR must name a folder that can be written where neither the package's "
            "nor the user's cache can be; without it every process compiles %s again",
            function.__name__,
        )
        return njit(**CALLED)(function)


def as_rows(t: Tensor | None, dtype: torch.dtype) -> Rows:
    """Return a tensor's rows, copied only if its dtype is another or its columns lie apart.

    Args:
        t: ``(rows, columns)``; ``None`` is an empty array.
        dtype: The kernel's.
    """
    if t is None:
        return torch.zeros(0, dtype=dtype).numpy(), 0
    t = t.detach().to(dtype)
    if t.stride(1) != 1:
        t = t.contiguous()
    stride = t.stride(0)
    return t.as_strided(((len(t) - 1) * stride + t.shape[1],), (1,)).numpy(), stride


def state_rows(states: Tensor | None) -> Tensor | None:
    """Return states with a row a state, ``(num_seqs * n, dim)``, of ``(num_seqs, dim, n)``."""
    return None if states is None else states.mT.flatten(0, 1)


def check_cpu_takes(x: Tensor) -> None:
    """Check that kernels can run on x.

    Raises:
        RuntimeError: It is on another device.
    """
    if x.device.type != "cpu":
        raise RuntimeError(
            f"x must be on the CPU with impl='cpu', got {x.device}; take impl='reference'"
        )


@njit(**CALLED)
def zeros(count, like):
    """Return a tile of zeros, ``(count, LANES)``.

    Each is an array of its own: loops over parts of one would not become vector instructions.
    """
    return np.zeros((count, LANES), like.dtype)


@njit(**CALLED)
def load_rows(tile, rows, i_row, count, first, lanes):
    """Copy ``count`` rows from ``i_row`` on, channels ``first`` to ``first + lanes``, to a tile."""
    memory, stride = rows
    for i in range(count):
        _load_row(tile, i, memory, (i_row + i) * stride + first, lanes)


@njit(**CALLED)
def store_rows(rows, i_row, count, first, lanes, tile):
    """Copy a tile to where :func:`load_rows` would take it from."""
    memory, stride = rows
    for i in range(count):
        _store_row(memory, (i_row + i) * stride + first, lanes, tile, i)


@njit(**CALLED)
def prefetch_row(rows, i_row, first):
    """Have a row on its way to the second cache; one that does not exist does no harm.

    Rows of a block lie too far apart for the processor to foresee the next.
    """
    memory, stride = rows
    start = i_row * stride + first
    # float32s of a cache line
    for d in range(0, LANES, 16):
        _prefetch(memory, np.uintp(start + d))


@intrinsic
def _prefetch(typing_context, memory, i):
    def emit(context, builder, signature, arguments):
        array = make_array(memory)(context, builder, arguments[0])
        address = builder.bitcast(builder.gep(array.data, [arguments[1]]), voidptr_t)
        int32 = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [voidptr_t, int32, int32, int32])
        prefetch = get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # to read, into the second cache, data
        builder.call(prefetch, [address, int32(0), int32(2), int32(1)])
        return context.get_dummy_value()

    return types.void(memory, i), emit


@njit(**CALLED)
def _load_row(tile, i, memory, start, lanes):
    # unsigned: an index that may be negative keeps the loop from vectors
    for d in range(lanes):
        tile[i, d] = memory[np.uintp(start + d)]


@njit(**CALLED)
def _store_row(memory, start, lanes, tile, i):
    for d in range(lanes):
        memory[np.uintp(start + d)] = tile[i, d]


def count_blocks(dim: int) -> int:
    """Return how many blocks of ``LANES`` channels there are."""
    return ceil(dim / LANES)


def run_blocks(kernel: Callable, dim: int, *args: object) -> None:
    """Call ``kernel(block, dim, *args)`` for every block of ``dim`` channels, on several threads.

    They are PyTorch's own where its OpenMP has GNU's entry, as on Linux. Those keep their cores
    busy for milliseconds after every operation of PyTorch, and other threads would wait for them.
    """
    num_blocks = count_blocks(dim)
    num_threads = min(num_blocks, torch.get_num_threads())
    if num_threads == 1:
        for block in range(num_blocks):
            kernel(block, dim, *args)
    elif (openmp := _openmp()) is not None:
        _run_on_openmp(openmp, num_threads, lambda block: kernel(block, dim, *args), num_blocks)
    else:
        with ThreadPoolExecutor(num_threads) as pool:
            # the list asks for results, and so raises what a block raised
            list(pool.map(lambda block: kernel(block, dim, *args), range(num_blocks)))


@cache
def _openmp() -> ctypes.CDLL | None:
    # looks in all libraries that PyTorch was linked with
    library = ctypes.CDLL(torch._C.__file__)
    return library if hasattr(library, "GOMP_parallel") else None


def _run_on_openmp(
    openmp: ctypes.CDLL, num_threads: int, run: Callable[[int], None], num_blocks: int
) -> None:
    blocks, errors = iter(range(num_blocks)), []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def work(_) -> None:
        try:
            for block in blocks:
                run(block)
        except BaseException as error:
            errors.append(error)

    # the body of a parallel region, called once by each thread
    openmp.GOMP_parallel(work, None, num_threads, 0)
    if errors:
        raise errors[0]
