"""Check and time the Gluon scan; a development script."""
import os, sys, time, statistics, itertools
import torch, triton
from xtuner_mamba.ops.selective_scan.gluon import selective_scan_gluon
from xtuner_mamba.ops.selective_scan import gluon_bwd
from xtuner_mamba.ops.selective_scan.reference import selective_scan_reference
from xtuner_mamba.testing import make_scan_inputs, in_float64, lognormal_lengths, assert_as_accurate_as_eager, eighths
dev = 'cuda'
ORDER = ['x','dt','A','B','C','D','z','dt_bias','initial_states']
def grads(fn, inp, softplus, rfs=True):
    L = {n: (t.detach().clone().requires_grad_() if t is not None and t.is_floating_point() else t) for n, t in inp.items()}
    a = [L.get(n) for n in ORDER]
    a = [t[0] if n in ('x','dt','B','C','z') and t is not None else t for n, t in zip(ORDER, a)]
    y, fs = fn(*a, L['cu_seqlens'], softplus, return_final_states=rfs)
    outs = [y] + ([fs] if rfs else [])
    inc = [eighths(t.shape, i).to(t.device, t.dtype) for i, t in enumerate(outs)]
    want = [n for n in ORDER if L.get(n) is not None]
    g = torch.autograd.grad(outs, [L[n] for n in want], inc)
    r = dict(zip(('y','fs'), outs)) | {'d'+n: v for n, v in zip(want, g)}
    return {k: v.detach() for k, v in r.items()}
def nan_empty():
    import builtins
    for owner, name in ((torch,'empty'),(torch,'empty_like'),(torch.Tensor,'new_empty')):
        f = getattr(owner, name)
        def w(*a, _f=f, **k):
            t = _f(*a, **k)
            if t.is_floating_point() and sys._getframe(1).f_globals['__name__'].startswith('xtuner_mamba'): t.detach().fill_(float('nan'))
            return t
        setattr(owner, name, w)
def ratio(act, eag, ex):
    out = []
    eps = torch.finfo(act.dtype).eps
    for norm, rnd in ((lambda t: t.square().mean().sqrt().item(), eps/4), (lambda t: t.abs().max().item(), eps/2)):
        e = norm(act.double()-ex); al = max(norm(eag.double()-ex), rnd*norm(ex)); out.append(e/max(al,1e-300))
    return out
def check(lengths, dim, dtype, softplus, drop, rfs=True, pad=0):
    inp = make_scan_inputs(lengths, dim=dim, dstate=16, dtype=dtype, device='cpu', seed=len(lengths))
    if not softplus: inp['dt'] = inp['dt'].abs()*.1; inp['dt_bias'] = inp['dt_bias'].abs()*.1
    for n in drop: inp[n] = None
    cu = {n: (t.to(dev) if t is not None else None) for n, t in inp.items()}
    d64 = {n: (t.double() if t is not None and t.is_floating_point() else t) for n, t in inp.items()}
    ex = grads(selective_scan_reference, d64, softplus, rfs); eag = grads(selective_scan_reference, inp, softplus, rfs)
    act = grads(selective_scan_gluon, cu, softplus, rfs)
    bad = []
    for k in ex:
        a = act[k].cpu()
        if not torch.isfinite(a).all(): bad.append(f'{k}:NAN'); continue
        r = ratio(a, eag[k], ex[k]); bad.append(f'{k} {r[0]:.2f}/{r[1]:.2f}')
    print(('n%d tot%d' % (len(lengths), sum(lengths))), 'dim', dim, str(dtype)[6:], 'sp', int(softplus), 'drop', ''.join(drop), 'rfs', int(rfs), '|', ' '.join(bad), flush=True)
    return cu
def tm(f, n=9):
    f(); f(); ts = []
    for _ in range(n):
        a = torch.cuda.Event(enable_timing=True); b = torch.cuda.Event(enable_timing=True); a.record(); f(); b.record(); b.synchronize(); ts.append(a.elapsed_time(b))
    return statistics.median(ts)
def problem(T, D, lens, seed=0):
    g = torch.Generator(device=dev); g.manual_seed(seed)
    rn = lambda *s: torch.randn(*s, device=dev, generator=g).bfloat16()
    ru = lambda *s: torch.rand(*s, device=dev, generator=g)
    cu = torch.zeros(len(lens)+1, dtype=torch.int32); cu[1:] = torch.tensor(lens).cumsum(0)
    return dict(x=rn(T,D), dt=(0.5*ru(T,D)-3).bfloat16(), A=-(torch.arange(1,17,device=dev).float()[None]*(0.5+ru(D,16))), B=rn(T,16), C=rn(T,16), D=rn(D).float(), z=rn(T,D), dt_bias=ru(D), cu=cu.to(dev), dy=rn(T,D))
def prof(f, n=3):
    from torch.profiler import profile, ProfilerActivity
    f(); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(n): f()
        torch.cuda.synchronize()
    return ' '.join(f'{e.key[:34]} {e.device_time_total/n/1e3:.3f}' for e in sorted(p.key_averages(), key=lambda e: -e.device_time_total)[:9])
def timing(T, D, lens, name, detail=False):
    p = problem(T, D, lens)
    a = [p[n] for n in ('x','dt','A','B','C','D','z','dt_bias')] + [None, p['cu'], True]
    with torch.no_grad(): f = tm(lambda: selective_scan_gluon(*a, return_final_states=False))
    for n in range(8): a[n].requires_grad_()
    y, _ = selective_scan_gluon(*a, return_final_states=False)
    bw = lambda: torch.autograd.grad(y, a[:8], p['dy'], retain_graph=True)
    torch.cuda.synchronize(); m0 = torch.cuda.memory_allocated(); torch.cuda.reset_peak_memory_stats(); g = bw(); torch.cuda.synchronize(); pk = torch.cuda.max_memory_allocated() - m0; outb = sum(t.numel()*t.element_size() for t in g); del g
    b = tm(bw)
    g1 = bw(); g2 = bw(); same = all(torch.equal(q, r) for q, r in zip(g1, g2))
    print(f'{name}: T{T} D{D} docs {len(lens)} fwd {f:.3f} bwd {b:.3f} temp MiB {(pk-outb)/2**20:.0f} same {same}', flush=True)
    if detail:
        with torch.no_grad(): print('   ', prof(lambda: selective_scan_gluon(*a, return_final_states=False)))
        print('   ', prof(bw), flush=True)
    return p
if __name__ == '__main__':
    t0 = time.time()
    what = sys.argv[1:] or ['check', 'time']
    if 'check' in what:
        from xtuner_mamba.ops.selective_scan import gluon_support; gluon_support._MIN_MEAN_SEQLEN = 0
        saved = torch.empty, torch.empty_like, torch.Tensor.new_empty
        nan_empty()
        L = [1,3,57,200,33,31,32,64,65,114]
        for args in ((L,128,torch.bfloat16,True,()), (L,64,torch.float16,True,()), ([1]*40+[128,129,127],256,torch.bfloat16,True,('initial_states',)), (L,192,torch.bfloat16,False,()), ([300,70,2,64,128],128,torch.bfloat16,True,('z',)), ([300,70],64,torch.bfloat16,True,('D','dt_bias','z','initial_states')), ([300,70],64,torch.float16,True,('D','dt_bias'))):
            check(*args)
        check(L,128,torch.bfloat16,True,(),False)
        torch.empty, torch.empty_like, torch.Tensor.new_empty = saved
        # isolation
        inp = make_scan_inputs(L, dim=256, dstate=16, dtype=torch.bfloat16, device=dev)
        r1 = grads(selective_scan_gluon, inp, True)
        i2 = {k: v.clone() for k, v in inp.items()}; s, e = sum(L[:3]), sum(L[:4])
        for k in ('x','dt','B','C','z'): i2[k][:, s:e] = float('nan')
        i2['initial_states'][3] = float('nan')
        r2 = grads(selective_scan_gluon, i2, True)
        keep = torch.ones(sum(L), dtype=torch.bool, device=dev); keep[s:e] = False
        kd = torch.ones(len(L), dtype=torch.bool, device=dev); kd[3] = False
        f = lambda k, v: v[kd] if k in ('fs','dinitial_states') else (v[0] if v.dim()==3 else v)[keep]
        print('isolation', {k: bool(torch.equal(f(k, r1[k]), f(k, r2[k]))) for k in r1 if k not in ('dA','dD','ddt_bias')}, 'guard', bool(torch.isnan(r2['y'][s:e]).any()), flush=True)
        print('check %.0f s' % (time.time()-t0), flush=True)
    if 'time' in what:
        from xtuner_mamba.ops.selective_scan import gluon_support; gluon_support._MIN_MEAN_SEQLEN = 0
        std = lognormal_lengths(65536)
        timing(65536, 4096, std, 'standard', True)
        gluon_bwd._MAX_SCRATCH_BYTES = 2**32; timing(65536, 4096, std, 'unsliced', True)
        gluon_bwd.INTERVAL = 32; timing(65536, 4096, std, 'unsliced interval 32')
        gluon_bwd.INTERVAL = 64; gluon_bwd._MAX_SCRATCH_BYTES = 2**28
        timing(65536, 1536, std, '1536'); timing(65536, 5120, std, '5120')
        m64 = [max(1, int(v)) for v in torch.distributions.Exponential(1/64.).sample((3000,)).tolist()]
        import itertools as it
        acc = list(it.accumulate(m64)); n = next(i for i, v in enumerate(acc) if v >= 65536); m64 = m64[:n+1]; m64[-1] -= acc[n]-65536
        timing(65536, 4096, m64, 'mean 64', True); timing(65536, 4096, [1]*65536, 'one-token', True); timing(65536, 4096, [4096]*16, 'rows 16x4096'); timing(4096, 4096, lognormal_lengths(4096), '4096'); timing(65536,4096,[65536],'one document')
        print('all %.0f s' % (time.time()-t0), flush=True)
