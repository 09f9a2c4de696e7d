"""mamba_ssm's own ``Mamba`` and ``Mamba2``: dispatched by name, exact on packs.

The package needs a GPU to be imported. Elsewhere modules stand in for its own that have their
names, parameters and settings, but no forward.
"""

import re
from functools import partial

import pytest
import ssd_stand_ins
import torch
from family_proof import InFloat64
from mixer_oracles import mamba2_token_by_token
from torch import nn
from transformers import Mamba2Config, MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from xtuner_mamba.layout import PackedLayout
from xtuner_mamba.model import dispatch_packed
from xtuner_mamba.model.dispatch import mamba, mamba2
from xtuner_mamba.ops import causal_conv1d, parts, ssd
from xtuner_mamba.ops.ssd import mamba_ssm
from xtuner_mamba.testing import relative_rms

# a process tries many variants of each kernel; one of several is enough
pytestmark = pytest.mark.xdist_group("mamba_ssm")
LENGTHS = [5, 17, 1, 2, 9]
LAYOUT = PackedLayout.from_lengths(LENGTHS)
# of our kernels, which elsewhere are interpreted
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HIDDEN = 16


class Mamba(nn.Module):
    """Parameters and settings of ``mamba_ssm.modules.mamba_simple.Mamba``."""

    activation = "silu"

    def __init__(self, d_inner=32, d_state=5, dt_rank=3, d_conv=4):
        super().__init__()
        self.in_proj = nn.Linear(HIDDEN, 2 * d_inner, bias=False)
        self.conv1d = nn.Conv1d(d_inner, d_inner, d_conv, groups=d_inner)
        self.x_proj = nn.Linear(d_inner, dt_rank + 2 * d_state, bias=False)
        self.dt_proj = nn.Linear(dt_rank, d_inner)
        self.A_log = nn.Parameter(torch.randn(d_inner, d_state))
        self.D = nn.Parameter(torch.randn(d_inner))
        self.out_proj = nn.Linear(d_inner, HIDDEN, bias=False)

    def forward(self, hidden_states, inference_params=None):
        return "their own", inference_params


class RMSNormGated(nn.Module):
    """Parameters and settings of mamba_ssm's gated norm."""

    def __init__(self, dim, group_size, norm_before_gate):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim))
        self.eps = 1e-5
        self.group_size, self.norm_before_gate = group_size, norm_before_gate


class Mamba2(nn.Module):
    """Parameters and settings of ``mamba_ssm.modules.mamba2.Mamba2``."""

    activation = "silu"

    def __init__(
        self,
        d_inner=32,
        d_ssm=None,
        d_state=5,
        headdim=8,
        ngroups=1,
        D_has_hdim=False,
        rmsnorm=True,
        norm_before_gate=False,
        dt_limit=(0.0, float("inf")),
    ):
        super().__init__()
        self.d_ssm = d_ssm or d_inner
        self.d_state, self.headdim, self.ngroups = d_state, headdim, ngroups
        self.rmsnorm, self.norm_before_gate, self.dt_limit = rmsnorm, norm_before_gate, dt_limit
        nheads = self.d_ssm // headdim
        conv_dim = self.d_ssm + 2 * ngroups * d_state
        self.in_proj = nn.Linear(HIDDEN, 2 * d_inner + 2 * ngroups * d_state + nheads, bias=False)
        self.conv1d = nn.Conv1d(conv_dim, conv_dim, 4, groups=conv_dim)
        self.dt_bias = nn.Parameter(torch.randn(nheads))
        self.A_log = nn.Parameter(torch.randn(nheads))
        self.D = nn.Parameter(torch.randn(self.d_ssm if D_has_hdim else nheads))
        if rmsnorm:
            self.norm = RMSNormGated(self.d_ssm, self.d_ssm // ngroups, norm_before_gate)
        self.out_proj = nn.Linear(d_inner, HIDDEN, bias=False)

    def forward(self, u, seqlen=None, seq_idx=None, cu_seqlens=None, inference_params=None):
        return "their own", inference_params


def draw_hidden_states():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(1, LAYOUT.total, HIDDEN, generator=draw, dtype=torch.float64)


def outputs_and_parameter_grads(mixer, forward, hidden_states):
    mixer.zero_grad()
    y = forward(hidden_states)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    (y * weights).sum().backward()
    return {"y": y.detach()} | {n: p.grad.clone() for n, p in mixer.named_parameters()}


def assert_packed_equals(mixer, alone):
    """Compare a mixer on the row with ``alone`` on each document, output and gradients."""

    def one_by_one(x):
        return torch.cat([alone(document) for document in x.split(LENGTHS, dim=1)], dim=1)

    x = draw_hidden_states()
    owner = alone if isinstance(alone, nn.Module) else mixer
    exact = outputs_and_parameter_grads(owner, one_by_one, x)
    with LAYOUT.published():
        actual = outputs_and_parameter_grads(mixer, mixer, x)
    assert actual.keys() == exact.keys()
    errors = {name: relative_rms(actual[name], exact[name]) for name in exact}
    assert max(errors.values()) < 1e-12, errors


def test_mamba_is_the_mixer_of_transformers():
    torch.manual_seed(0)
    mixer = Mamba().double()
    config = MambaConfig(hidden_size=HIDDEN, state_size=5, time_step_rank=3)
    theirs = MambaMixer(config, layer_idx=0).double()
    theirs.load_state_dict(mixer.state_dict())
    assert dispatch_packed(mixer).counts == {"Mamba": 1}
    with InFloat64():
        assert_packed_equals(mixer, theirs)


SETTINGS = pytest.mark.parametrize(
    "settings",
    [
        {},
        dict(ngroups=2),
        dict(D_has_hdim=True, norm_before_gate=True, ngroups=2),
        dict(rmsnorm=False, dt_limit=(0.1, 1.5)),
        dict(d_inner=32, d_ssm=16),
    ],
    ids=str,
)


@SETTINGS
def test_mamba2_is_the_recurrence(settings):
    torch.manual_seed(0)
    mixer = Mamba2(**settings).double()
    assert dispatch_packed(mixer).counts == {"Mamba2": 1}
    assert_packed_equals(mixer, lambda document: mamba2_token_by_token(mixer, document))


@pytest.fixture
def mixer_kernels(monkeypatch):
    """Let a mixer run as on a GPU: our kernels interpreted elsewhere, mamba_ssm's stood in for."""
    monkeypatch.setattr(mamba, "causal_conv1d", partial(causal_conv1d, impl="triton"))
    monkeypatch.setattr(mamba_ssm, "why_not_mamba_ssm", lambda x: None)
    monkeypatch.setattr(mamba_ssm, "_kernels", lambda: ssd_stand_ins)
    monkeypatch.setattr(mamba2, "ssd", partial(ssd, impl="mamba_ssm"))


@pytest.mark.usefixtures("mixer_kernels")
@pytest.mark.parametrize("settings", [{}, dict(rmsnorm=False), dict(d_ssm=16)], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_parts_are_where_ops_wrote_them(recompute, settings, monkeypatch):
    allocate, split_parts, written, arrived = parts.GradientPart.allocate, parts.split_parts, [], []

    def note_written(self):
        written.append(allocate(self))
        return written[-1]

    def note_arrived(whole, sizes):
        whole.register_hook(arrived.append)
        return split_parts(whole, sizes)

    monkeypatch.setattr(parts.GradientPart, "allocate", note_written)
    monkeypatch.setattr(mamba2, "split_parts", note_arrived)
    torch.manual_seed(0)
    mixer = Mamba2(**settings).to(DEVICE)
    dispatch_packed(mixer, recompute=recompute)
    with LAYOUT.to(DEVICE).published():
        mixer(draw_hidden_states().float().to(DEVICE)).sum().backward()
    # recomputed, that of in_proj is cut twice
    dconvolved, dprojected, *_ = arrived
    dim, first = mixer.d_ssm, 2 * (32 - mixer.d_ssm)
    sizes = [first, dim, dim + 10, mixer.dt_bias.numel()]
    _, dz, dxBC, _ = dprojected.split(sizes, dim=-1)
    places = [dz, dxBC, *dconvolved.split([dim, 5, 5], dim=-1)]
    assert len(written) == len(places)
    for place in places:
        assert any(part.is_set_to(place) for part in written)


@pytest.mark.usefixtures("mixer_kernels")
@pytest.mark.parametrize(
    ("settings", "recompute"),
    [({}, True), (dict(ngroups=2), False), (dict(d_ssm=16), False), (dict(rmsnorm=False), False)],
)
def test_gradients_are_those_that_autograd_lays_side_by_side(recompute, settings, monkeypatch):
    def run():
        torch.manual_seed(0)
        mixer = Mamba2(**settings).to(DEVICE)
        dispatch_packed(mixer, recompute=recompute)
        x = draw_hidden_states().float().to(DEVICE)
        with LAYOUT.to(DEVICE).published():
            return outputs_and_parameter_grads(mixer, mixer, x)

    def split_by_autograd(whole, sizes):
        return whole.split(sizes, dim=-1), len(sizes) * [None]

    actual = run()
    monkeypatch.setattr(mamba2, "split_parts", split_by_autograd)
    for name, expected in run().items():
        assert torch.equal(actual[name], expected), name


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_mixer_of_transformers_computes_what_mamba_ssm_does_with_its_weights(groups):
    torch.manual_seed(0)
    source = Mamba2(ngroups=groups).double()
    config = Mamba2Config(
        hidden_size=HIDDEN, state_size=5, num_heads=4, head_dim=8, n_groups=groups
    )
    mixer = Mamba2Mixer(config, layer_idx=0).double()
    mixer.load_state_dict(source.state_dict())
    source.forward = partial(mamba2_token_by_token, source)
    assert dispatch_packed(mixer).counts == {"Mamba2Mixer": 1}
    assert_packed_equals(mixer, source)


@pytest.mark.parametrize("build", [Mamba, Mamba2])
def test_generation_is_theirs(build):
    mixer = build().double()
    dispatch_packed(mixer)
    x = draw_hidden_states()
    assert mixer(x, inference_params=3) == ("their own", 3)
    with LAYOUT.published(), pytest.raises(RuntimeError, match="use_cache must be False"):
        mixer(x, inference_params=3)


@pytest.mark.parametrize(
    ("name", "given"),
    [("seqlen", 7), ("seq_idx", torch.tensor([3])), ("cu_seqlens", torch.tensor([4]))],
)
def test_boundaries_come_from_the_layout_alone(name, given):
    mixer = Mamba2()
    dispatch_packed(mixer)
    told = rf"{name} of a dispatched Mamba2 must be None, got {re.escape(str(given))}"
    with LAYOUT.published(), pytest.raises(RuntimeError, match=told):
        mixer(draw_hidden_states(), **{name: given})


class MHA(nn.Module):
    """Attention of mamba_ssm's hybrids, which has no conv by default."""


class Attend(nn.Module):
    """Of a name that tells nothing."""


class Block(nn.Module):
    """Slots of mamba_ssm's block."""

    def __init__(self, mixer):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(HIDDEN), mixer


@pytest.mark.parametrize("build", [MHA, Attend, partial(nn.Linear, HIDDEN, HIDDEN)])
def test_whatever_else_is_a_mixer_of_a_hybrid_is_refused_by_name(build):
    other = build()
    model = nn.Sequential(Block(Mamba2()), Block(other))
    with pytest.raises(RuntimeError, match=rf"got none for \['{type(other).__name__}'\]"):
        dispatch_packed(model)
    model = nn.Sequential(Block(Mamba2()), Block(nn.Identity()))
    assert dispatch_packed(model).counts == {"Mamba2": 1}


@pytest.mark.parametrize("name", ["Mamba", "Mamba2"])
def test_another_class_of_the_same_name_is_refused(name):
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.A_log = nn.Parameter(torch.zeros(1))

    Whole.__name__ = name
    told = rf"{name} must be the mixer of mamba_ssm, got one of \S+ without \['in_proj', 'conv1d'\]"
    with pytest.raises(RuntimeError, match=told):
        dispatch_packed(Whole())


def test_a_mixer_in_parts_is_refused():
    mixer = Mamba2()
    mixer.process_group = "two ranks"
    with pytest.raises(
        RuntimeError, match=r"process_group of Mamba2 must be None .* got two ranks"
    ):
        dispatch_packed(mixer)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="mamba_ssm needs a GPU")
@pytest.mark.parametrize(
    ("path", "settings"),
    [("mamba_simple.Mamba", {}), ("mamba2.Mamba2", {}), ("mamba2.Mamba2", dict(ngroups=2))],
)
def test_mamba_ssm_itself(path, settings):
    module, name = path.split(".")
    build = getattr(pytest.importorskip(f"mamba_ssm.modules.{module}"), name)
    torch.manual_seed(0)
    # narrower, their conv refuses Mamba-2's rows
    mixer = build(256, **settings).cuda()
    x = torch.randn(1, LAYOUT.total, 256, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        alone = torch.cat([mixer(document) for document in x.split(LENGTHS, dim=1)], dim=1)
        assert dispatch_packed(mixer).counts == {name: 1}
        with LAYOUT.to("cuda").published():
            packed = mixer(x)
        with PackedLayout.from_lengths([LAYOUT.total]).to("cuda").published():
            leaking = mixer(x)
    assert relative_rms(packed, alone) < 2e-2
    assert relative_rms(leaking, alone) > 5e-2
