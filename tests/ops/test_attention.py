"""Attention over packed documents against a token-by-token oracle; kernels where a GPU is."""

import functools
import logging
import math
import sys
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.ops import attention
from xtuner_mamba.ops.attention import api, blocked, flash, kernels, varlen
from xtuner_mamba.testing import assert_errs_like_eager, eighths, relative_rms

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
EXACT = ["blocked", "reference"]
KERNELS = ["varlen"] * GPU + ["flash"] * (GPU and find_spec("flash_attn") is not None)
# one token, one short of a block of 4, a whole one, one over it, two blocks, neighbours of one
LENGTHS = [3, 1, 1, 4, 5, 8, 9, 2]
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 3},
    "itself": {"sliding_window": 1},
    "wide": {"sliding_window": 100},
    "softcap": {"softcap": 0.7},
    "all": {"sliding_window": 4, "softcap": 0.5, "scale": 0.9},
}
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (3, 1)}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocked, "_BLOCK", 4)


def make_inputs(lengths, heads="gqa", dtype=torch.float64, headdim=8, seed=0):
    nheads, nkvheads = HEADS[heads]
    draw = torch.Generator().manual_seed(seed)
    shapes = {"q": nheads, "k": nkvheads, "v": nkvheads}
    return {
        name: torch.randn(1, sum(lengths), count, headdim, generator=draw).to(DEVICE, dtype)
        for name, count in shapes.items()
    }


def oracle(q, k, v, *, lengths, scale=None, sliding_window=None, softcap=None):
    """One query, one head at a time, from the formula."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    ys, start = [], 0
    for length in lengths:
        for i in range(start, start + length):
            first = start if sliding_window is None else max(start, i - sliding_window + 1)
            for h in range(q.shape[2]):
                scores = scale * (k[0, first : i + 1, h // group] * q[0, i, h]).sum(-1)
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.exp(scores - scores.max())
                ys.append(
                    (weights[:, None] * v[0, first : i + 1, h // group]).sum(0) / weights.sum()
                )
        start += length
    return torch.stack(ys).view(q.shape)


def eager(q, k, v, *, lengths, scale=None, sliding_window=None, softcap=None):
    """A document at a time as transformers' eager attention computes it, in the inputs' dtype."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ys = []
    for q_i, k_i, v_i in zip(*(t[0].transpose(0, 1).split(lengths, dim=1) for t in (q, k, v))):
        k_i, v_i = (t.repeat_interleave(len(q_i) // len(t), dim=0) for t in (k_i, v_i))
        scores = q_i @ k_i.mT * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        i = torch.arange(q_i.shape[1], device=q.device)
        hidden = i > i[:, None]
        if sliding_window is not None:
            hidden |= i <= i[:, None] - sliding_window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1, dtype=torch.float32)
        ys.append((weights.to(q.dtype) @ v_i).transpose(0, 1))
    return torch.cat(ys)[None]


def outputs_and_grads(op, inputs, **options):
    leaves = {name: t.detach().clone().requires_grad_() for name, t in inputs.items()}
    y = op(**leaves, **options)
    incoming = eighths(y.shape).to(y)
    grads = torch.autograd.grad(y, list(leaves.values()), incoming)
    return {"y": y.detach()} | {f"d{name}": grad for name, grad in zip(leaves, grads)}


def packed(inputs, lengths, **options):
    cu_seqlens = PackedLayout.from_lengths(lengths).to(inputs["q"].device).cu_seqlens
    return outputs_and_grads(attention, inputs, cu_seqlens=cu_seqlens, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("impl", EXACT)
def test_exact_paths_equal_the_formula(small_blocks, impl, heads, options):
    inputs = make_inputs(LENGTHS, heads)
    exact = outputs_and_grads(oracle, inputs, lengths=LENGTHS, **options)
    for name, value in packed(inputs, LENGTHS, impl=impl, **options).items():
        assert value.dtype == torch.float64
        assert relative_rms(value, exact[name]) < 1e-12, name
    # these documents and this window show a leak and an error by one
    for wrong in ({"lengths": [sum(LENGTHS)]}, {"sliding_window": 2}):
        other = outputs_and_grads(oracle, inputs, **{"lengths": LENGTHS, **options, **wrong})
        if options.get("sliding_window") != 1 or "lengths" not in wrong:
            assert all(relative_rms(other[name], exact[name]) > 1e-3 for name in exact)


@pytest.mark.parametrize("impl", EXACT)
def test_gradients_pass_gradcheck(small_blocks, impl):
    inputs = make_inputs([2, 5], headdim=3)
    leaves = [t.requires_grad_() for t in inputs.values()]
    cu_seqlens = PackedLayout.from_lengths([2, 5]).to(DEVICE).cu_seqlens
    options = dict(sliding_window=3, softcap=1.5, impl=impl)
    assert torch.autograd.gradcheck(
        lambda *t: attention(*t, cu_seqlens=cu_seqlens, **options), leaves
    )


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_exact_paths_err_no_more_than_eager(small_blocks, dtype, options):
    # a GPU's exponential errs by 2 units in the last place, a CPU's by half
    check_against_eager("blocked", dtype, LENGTHS, options, factor=3 if GPU else 2)


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["window"]], ids=["plain", "window"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("impl", KERNELS)
def test_kernels_err_like_eager(impl, dtype, heads, options):
    lengths = [1, 63, 64, 65, 127, 129, 200, 1, 1]
    check_against_eager(impl, dtype, lengths, options, heads=heads, headdim=64, factor=3)


def check_against_eager(impl, dtype, lengths, options, *, factor, **shape):
    actual, expected, exact = [], [], []
    for seed in range(4):
        inputs = make_inputs(lengths, dtype=dtype, seed=seed, **shape)
        actual.append(packed(inputs, lengths, impl=impl, **options))
        on_cpu = {name: t.cpu() for name, t in inputs.items()}
        expected.append(outputs_and_grads(eager, on_cpu, lengths=lengths, **options))
        in_float64 = {name: t.double() for name, t in on_cpu.items()}
        exact.append(outputs_and_grads(eager, in_float64, lengths=lengths, **options))
    assert_errs_like_eager(actual, expected, exact, factor=factor)


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("victim", [0, 1, 3, 5])
@pytest.mark.parametrize("impl", [*EXACT, *KERNELS])
def test_a_document_changes_no_bit_of_the_others(small_blocks, impl, victim, value):
    lengths = [5, 1, 17, 9, 2, 33]
    dtype = torch.float32 if impl in EXACT else torch.bfloat16
    inputs = make_inputs(lengths, dtype=dtype)
    poisoned = {name: t.clone() for name, t in inputs.items()}
    mine = PackedLayout.from_lengths(lengths).seq_idx[0].to(DEVICE) == victim
    for tensor in poisoned.values():
        tensor[:, mine] = value
    before, after = (packed(t, lengths, impl=impl) for t in (inputs, poisoned))
    for name, tensor in before.items():
        assert torch.equal(tensor[:, ~mine], after[name][:, ~mine]), name
        assert tensor[:, ~mine].abs().max() > 0
    assert not torch.equal(before["y"][:, mine], after["y"][:, mine])


@pytest.mark.parametrize("impl", [*EXACT, *KERNELS])
def test_the_same_inputs_give_the_same_bits(impl):
    lengths = [40, 1, 300, 17]
    inputs = make_inputs(lengths, dtype=torch.bfloat16)
    first = packed(inputs, lengths, impl=impl)
    for _ in range(3):
        again = packed(inputs, lengths, impl=impl)
        assert all(torch.equal(again[name], value) for name, value in first.items())


def test_rows_without_boundaries_are_documents():
    inputs = {name: t.view(3, 4, *t.shape[2:]) for name, t in make_inputs([12]).items()}
    rows = attention(**inputs)
    one_row = attention(
        **{name: t.reshape(1, 12, *t.shape[2:]) for name, t in inputs.items()},
        cu_seqlens=PackedLayout.from_lengths([4, 4, 4]).to(DEVICE).cu_seqlens,
    )
    assert torch.equal(rows.view(one_row.shape), one_row)


class _LargestTensor(TorchDispatchMode):
    """Note the most numbers that an operation has made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


def test_memory_grows_with_a_document_and_not_with_its_square():
    lengths = [600, 500, 700]
    inputs = make_inputs(lengths, "mha", torch.float32, headdim=2)
    with _LargestTensor() as seen:
        packed(inputs, lengths, impl="blocked")
    assert 0 < seen.numel <= blocked._BLOCK * max(lengths) * HEADS["mha"][0]
    with _LargestTensor() as seen:
        packed(inputs, lengths, impl="blocked", sliding_window=20)
    assert 0 < seen.numel <= blocked._BLOCK * (blocked._BLOCK + 20) * HEADS["mha"][0]


def test_autocast_rounds_nothing_not_even_in_a_backward_under_it():
    inputs = make_inputs(LENGTHS, dtype=torch.float32)
    plain = packed(inputs, LENGTHS, impl="blocked")
    with torch.autocast(DEVICE.type, torch.bfloat16):
        under_autocast = packed(inputs, LENGTHS, impl="blocked")
    for name, value in plain.items():
        assert torch.equal(under_autocast[name], value), name


# -- the choice -----------------------------------------------------------------------------------


class _OnGpu:
    """As much of a CUDA tensor as the choice looks at."""

    def __init__(self, dtype=torch.bfloat16, headdim=64):
        self.device, self.is_cuda = torch.device("cuda", 0), True
        self.dtype, self.shape = dtype, (1, 4, 2, headdim)


@pytest.fixture
def capable(monkeypatch):
    """A GPU that takes every kernel, a PyTorch that has its own, and no flash-attn."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(
        kernels, "_why_not_flash_attn", lambda capped: "flash-attn must be there, got none"
    )
    monkeypatch.setattr(api, "_logged", set())
    return monkeypatch


def test_the_kernel_of_pytorch_is_taken_where_it_can(capable):
    assert api._choose_impl(_OnGpu(), None) == "varlen"


def test_flash_attn_is_taken_for_what_pytorch_cannot(capable):
    capable.setattr(kernels, "_why_not_flash_attn", lambda capped: None)
    assert api._choose_impl(_OnGpu(), 30.0) == "flash"


@pytest.mark.parametrize(
    ("q", "softcap", "told"),
    [
        (_OnGpu(), 30.0, "softcap must be None for PyTorch's kernel, got 30.0; flash-attn must be"),
        (_OnGpu(torch.float32), None, "q must be bfloat16 or float16, got torch.float32"),
        (_OnGpu(headdim=36), None, "headdim must be a multiple of 8 up to 256, got 36"),
    ],
    ids=["softcap", "float32", "headdim"],
)
def test_exact_products_on_a_gpu_are_chosen_with_one_word_why(capable, caplog, q, softcap, told):
    with caplog.at_level(logging.WARNING):
        assert [api._choose_impl(q, softcap) for _ in range(3)] == ["blocked"] * 3
    assert len(caplog.messages) == 1
    assert told in caplog.messages[0]


def test_an_old_gpu_is_named(capable):
    capable.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    told = kernels.why_not_varlen(_OnGpu(), None)
    assert told == "the GPU must have compute capability 8.0 or above, got (7, 5)"


def test_a_pytorch_built_without_flash_attention_is_named(capable):
    capable.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    told = kernels.why_not_varlen(_OnGpu(), None)
    assert told == f"torch must be built with flash attention, got {torch.__version__} without"


def test_operators_of_another_pytorch_are_named(monkeypatch):
    assert kernels._why_not_torch.__wrapped__() is None
    monkeypatch.setattr(kernels, "_BACKWARD", ["grad_out"])
    assert "torch must be 2.11 or later" in kernels._why_not_torch.__wrapped__()
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert kernels._why_not_torch.__wrapped__().endswith(f"varlen, got {torch.__version__}")


def test_flash_attn_without_a_softcap_is_named(monkeypatch, flash_attn):
    assert kernels._why_not_flash_attn.__wrapped__(True) is None
    monkeypatch.setattr(
        flash_attn, "flash_attn_varlen_func", lambda q, *, window_size, deterministic: None
    )
    assert kernels._why_not_flash_attn.__wrapped__(False) is None
    told = kernels._why_not_flash_attn.__wrapped__(True)
    assert told.endswith("got 2.5 without ['softcap']")
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    assert "got none" in kernels._why_not_flash_attn.__wrapped__(True)


@pytest.mark.skipif(GPU, reason="a GPU would not refuse")
@pytest.mark.parametrize("impl", ["varlen", "flash"])
def test_a_named_kernel_is_refused_where_it_cannot_run(impl):
    inputs = make_inputs([4], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"CUDA device, got cpu, which impl='{impl}' needs; take"):
        attention(**inputs, impl=impl)


@pytest.mark.skipif(not GPU, reason="asks something of a GPU")
def test_a_named_kernel_is_refused_for_what_it_cannot():
    inputs = make_inputs([4])
    with pytest.raises(ValueError, match=r"bfloat16 or float16, got torch.float64, which impl="):
        attention(**inputs, impl="varlen")
    inputs = make_inputs([4], dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"softcap must be None for PyTorch's kernel, got 2.0"):
        attention(**inputs, softcap=2.0, impl="varlen")


# -- what the kernels are handed, without a GPU ---------------------------------------------------


def flash_semantics(q, k, v, cu_seqlens, max_seqlen, scale, window):
    """What flash attention's documentation says: j in [i - left, i + right]; -1 is no bound."""
    assert max_seqlen == max(cu_seqlens.diff().tolist())
    left, right = window
    assert right == 0
    lengths = cu_seqlens.diff().tolist()
    return oracle(
        q[None], k[None], v[None], lengths=lengths, scale=scale,
        sliding_window=None if left < 0 else left + 1,
    )[0]  # fmt: skip


@pytest.fixture
def torch_operators(monkeypatch):
    """PyTorch's operators by what they document, since they have no CPU kernel."""

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, is_causal, scale, window):
        assert is_causal == (window == [-1, 0])
        return flash_semantics(q, k, v, cu_q, max_q, scale, window), q[..., 0], q.new_zeros(2)

    def backward(dy, q, k, v, y, lse, cu_q, cu_k, max_q, max_k, is_causal, rng, scale, window):
        assert torch.are_deterministic_algorithms_enabled()
        assert is_causal == (window == [-1, 0])
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            y = flash_semantics(*leaves, cu_q, max_q, scale, window)
            return torch.autograd.grad(y, leaves, dy)

    operators = ModuleType("torch_attn")
    operators._varlen_attn, operators._varlen_attn_backward = forward, backward
    monkeypatch.setattr(torch.ops, "torch_attn", operators)


@pytest.fixture
def flash_attn(monkeypatch):
    module = ModuleType("flash_attn")

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
    ):  # fmt: skip
        assert causal
        assert deterministic
        return flash_semantics(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size)

    module.flash_attn_varlen_func, module.__version__ = flash_attn_varlen_func, "2.5"
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(kernels, "find_spec", lambda name: object())
    return module


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("name", ["varlen", "flash"])
def test_kernels_are_handed_what_they_document(torch_operators, flash_attn, name, window):
    launch = {"varlen": varlen.attention_varlen, "flash": flash.attention_flash}[name]
    inputs = make_inputs(LENGTHS)
    cu_seqlens = PackedLayout.from_lengths(LENGTHS).to(DEVICE).cu_seqlens

    def launched(q, k, v):
        return launch(q[0], k[0], v[0], cu_seqlens, 0.3, window, None)[None]

    exact = functools.partial(oracle, lengths=LENGTHS, scale=0.3, sliding_window=window)
    expected = outputs_and_grads(exact, inputs)
    for result, value in outputs_and_grads(launched, inputs).items():
        assert relative_rms(value, expected[result]) < 1e-12, result
    assert not torch.are_deterministic_algorithms_enabled()


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"q": torch.zeros(1, 6, 8)}, r"q must have shape .* got \(1, 6, 8\)"),
        ({"k": torch.zeros(1, 5, 2, 8)}, r"k must have .* seqlen=6, .* \(1, 5, 2, 8\)"),
        ({"v": torch.zeros(1, 6, 2, 4)}, r"v must have .* headdim=8\), got \(1, 6, 2, 4\)"),
        ({"v": torch.zeros(1, 6, 1, 8)}, r"a divisor of nheads=4, got 2 and 1"),
        ({"k": torch.zeros(1, 6, 3, 8), "v": torch.zeros(1, 6, 3, 8)}, r"nheads=4, got 3 and 3"),
        ({"v": torch.zeros(1, 6, 2, 8).double()}, r"like q, .* torch.float64 on cpu; take v.to"),
        ({name: torch.zeros(1, 6, 2, 8).long() for name in "qkv"}, r"floating.* torch.int64"),
        ({"sliding_window": 0}, r"at least 1, a token itself, got 0"),
        ({"sliding_window": 2.5}, r"sliding_window must be an integer .*, got 2.5; None"),
        ({"softcap": 0.0}, r"softcap must be positive and finite, got 0.0; None .* no cap"),
        ({"softcap": math.inf}, r"softcap must be positive and finite, got inf"),
        ({"scale": math.nan}, r"scale must be positive and finite, got nan; .* headdim \*\* -0.5"),
        ({"scale": 0.0}, r"scale must be positive and finite, got 0.0"),
        ({"cu_seqlens": [0, 6]}, r"cu_seqlens must be a tensor, got \[0, 6\]; build it"),
        ({"impl": "sdpa"}, r"'blocked' or 'reference', got 'sdpa'"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"int32 .* got torch.int64"),
        ({"cu_seqlens": torch.tensor([0, 4], dtype=torch.int32)}, r"row's 6 tokens, got 4"),
        ({"cu_seqlens": torch.zeros(2, dtype=torch.int32, device="meta")}, r"of q, cpu, got meta"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_with_their_values(change, told):
    arguments = {
        name: torch.zeros(1, 6, count, 8) for name, count in (("q", 4), ("k", 2), ("v", 2))
    }
    with pytest.raises(ValueError, match=told):
        attention(**{**arguments, **change})


def test_rows_beside_boundaries_are_refused():
    q = torch.zeros(2, 3, 1, 8)
    with pytest.raises(ValueError, match=r"batch 1 with cu_seqlens, got \(2, 3, 1, 8\); lay"):
        attention(q, q, q, cu_seqlens=PackedLayout.from_lengths([3, 3]).cu_seqlens)


def test_pairs_of_offsets_cover_every_query_once():
    offsets = (0, 5, 133, 134, 600)
    rows = [rows for rows, _ in blocked._blocks(offsets, 7)]
    assert [i for row in rows for i in range(row.start, row.stop)] == list(range(600))
    for row, columns in blocked._blocks(offsets, 7):
        document = next(pair for pair in pairwise(offsets) if pair[0] <= row.start < pair[1])
        assert document[0] <= columns.start
        assert columns.stop == row.stop <= document[1]
