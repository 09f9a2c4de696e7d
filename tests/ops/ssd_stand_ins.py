"""What mamba_ssm's kernels compute, in plain PyTorch, under their names and with their arguments.

Gradients are autograd's. In the equations c counts chunks, l and s their tokens, g groups, h heads,
p channels, n states. Nothing here knows of documents.
"""

import torch
import torch.nn.functional as F
from torch.autograd import grad


def _chunk_state_fwd(B, x, steps, dA_cumsum, *, states_in_fp32):
    assert states_in_fp32
    return _added(B, x, steps, dA_cumsum)


def _bmm_chunk_fwd(C, B, chunk_size, *, output_dtype):
    C, B = (t[0].unflatten(0, (-1, chunk_size)) for t in (C, B))
    return torch.einsum("clgn,csgn->cgls", C, B)[None].to(output_dtype)


def _bmm_chunk_bwd(a, dout, *, residual):
    a = a[0].unflatten(0, (-1, dout.shape[-1]))
    return torch.einsum("cgls,clgn->csgn", dout[0], a).flatten(0, 1)[None] + residual


def _chunk_scan_fwd(CB, x, steps, dA_cumsum, C, states, *, D, z):
    y = _within(CB, x, steps, dA_cumsum, D) + _from_states(C, dA_cumsum, states)
    return (y, None) if z is None else (y * F.silu(z), y)


def _chunk_scan_bwd_dz(x, z, ungated, dout, chunk_size, *, has_ddAcs, D):
    assert not has_ddAcs
    z = z.clone().requires_grad_()
    with torch.enable_grad():
        dz = grad(ungated * F.silu(z), z, dout)[0]
    dout = dout * F.silu(z.detach())
    dD = None if D is None else (dout * x).sum((0, 1) if D.ndim == 2 else (0, 1, 3))
    return dz, dout, dD


def _chunk_scan_bwd_dstates(C, dA_cumsum, dout, *, dtype):
    shape = 1, dA_cumsum.shape[2], *dout.shape[2:], C.shape[-1]
    states = C.new_zeros(shape, dtype=dtype)
    return _gradients(lambda s: _from_states(C, dA_cumsum, s), dout, states)[0]


def _chunk_scan_bwd_dC(states, dA_cumsum, dout, *, C, ngroups):
    assert ngroups == C.shape[2]
    return _gradients(lambda C, cs: _from_states(C, cs, states), dout, C, dA_cumsum)


def _chunk_scan_bwd_dcb(x, steps, dA_cumsum, dout, *, ngroups):
    chunks, chunk_size = steps.shape[2:]
    CB = x.new_zeros(1, chunks, ngroups, chunk_size, chunk_size)
    return _gradients(lambda CB: _within(CB, x, steps, dA_cumsum), dout, CB)[0]


def _chunk_scan_bwd_ddAcs_stable(x, steps, dA_cumsum, dout, CB):
    return _of_each(_gradients(lambda cs: _within(CB, x, steps, cs), dout, dA_cumsum)[0])


def _chunk_state_bwd_db(x, steps, dA_cumsum, dstates, *, B, ngroups):
    assert ngroups == B.shape[2]
    dB, dsums = _gradients(lambda B, cs: _added(B, x, steps, cs), dstates.to(x), B, dA_cumsum)
    return dB, _of_each(dsums)


def _chunk_scan_chunk_state_bwd_dx(x, steps, dA_cumsum, B, CB, dout, dstates, *, D):
    def parts(x, steps, D=None):
        return _within(CB, x, steps, dA_cumsum, D), _added(B, x, steps, dA_cumsum)

    leaves = (x, steps) if D is None else (x, steps, D)
    dx, dsteps, *dD = _gradients(parts, (dout, dstates.to(x)), *leaves)
    return dx, dsteps, dD[0] if dD else None


def _from_states(C, dA_cumsum, states):
    C = _by_head(C, dA_cumsum)
    y = torch.einsum("clhn,hcl,chpn->clhp", C, dA_cumsum[0].exp(), states[0])
    return y.flatten(0, 1)[None]


def _within(CB, x, steps, dA_cumsum, D=None):
    sums = dA_cumsum[0]
    between = sums[..., None] - sums[..., None, :]
    causal = torch.ones_like(between, dtype=torch.bool).tril()
    # filled before the exponential, whose overflow has no gradient
    decays = between.masked_fill(~causal, -torch.inf).exp()
    CB = CB[0].repeat_interleave(len(sums) // CB.shape[2], dim=1)
    x_c = x[0].unflatten(0, (-1, sums.shape[-1]))
    y = torch.einsum("chls,hcls,hcs,cshp->clhp", CB, decays, steps[0], x_c)
    y = y.flatten(0, 1)[None]
    return y if D is None else y + D.view(len(D), -1) * x


def _added(B, x, steps, dA_cumsum):
    B, sums = _by_head(B, dA_cumsum), dA_cumsum[0]
    to_end = (sums[..., -1:] - sums).exp()
    x = x[0].unflatten(0, (-1, sums.shape[-1]))
    return torch.einsum("cshn,hcs,hcs,cshp->chpn", B, to_end, steps[0], x)[None]


def _by_head(B, dA_cumsum):
    _, nheads, _, chunk_size = dA_cumsum.shape
    return B[0].unflatten(0, (-1, chunk_size)).repeat_interleave(nheads // B.shape[2], dim=2)


def _gradients(function, incoming, *inputs):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    with torch.enable_grad():
        return grad(function(*leaves), leaves, incoming)


def _of_each(dsums):
    """Turn gradients of sums from the start into gradients of the summands."""
    return dsums.flip(-1).cumsum(-1).flip(-1)
