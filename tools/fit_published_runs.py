"""Fits the constants of the planner (src/plan/problem.hpp) on published_runs.csv, the rows given alone, with two-fold cross-validation.

Run in the project's root: python3 tools/fit_published_runs.py [path of published_runs.csv]. Needs numpy, scipy, pandas.
  --splits   24 random halves instead of one split
  --write    its table into docs/planning_reference.md
  --check    fails where the planner's constants or docs/planning_reference.md have other figures than the fit
"""
import pathlib
import re
import sys
import numpy as np, pandas as pd
from scipy.optimize import least_squares, nnls

ROOT = pathlib.Path(__file__).resolve().parent.parent
CSV = next((a for a in sys.argv[1:] if not a.startswith('--')), ROOT.parent / 'shared/data/published_runs.csv')
GIB = 2.0**30

# ---- taken from sources, never fitted: the planner's own files are read, so that both go by the same numbers -------------------------
def source(name): return (ROOT / 'src/plan' / name).read_text()

def number(file, name):
    """The value of `name = EXPRESSION` in a file of the planner."""
    return eval(re.search(r'\b%s = ([\d.e+* ()<-]+)' % name, source(file)).group(1))

def devices():
    """By name: peak bf16 FLOP/s, fp8 and fp4 factors, HBM bytes/s, fast link bytes/s each way, GPUs on it, network bytes/s a GPU, attention efficiency."""
    columns = r'\{"([\w-]+)", (?:k\w+|"[^"]*"),\s*((?:[\d.]+,?\s*){11})(?:, *\s*"\w+")?\}'
    rows = {name: [float(x) for x in re.findall(r'[\d.]+', cells)] for name, cells in re.findall(columns, source('clusters.cpp'))}
    assert len(rows) == len(re.findall(r'^    \{"', source('clusters.cpp'), re.M)) > 0, 'clusters.cpp has rows of another form'
    shares = re.search(r'share_of_attention\(std::string_view device\) \{\n  return (.*?);', source('published.cpp'), re.S).group(1)
    a100, v100, other = (float(x) for x in re.findall(r'0\.\d+', shares))
    made = {}
    for name, (memory, rate, fp64, fp32, bf16, fp8, best, host, joined, fast, net) in rows.items():
        k8 = fp8 / bf16 if fp8 else 1
        share = a100 if name.startswith('a100') else v100 if name.startswith('v100') else other
        made[name] = (bf16*1e12, k8, k8*(3 if name == 'gb300' else 2), rate*1e12, fast*1e9, joined, net*1e9, share)
    return made

DEVICES = re.findall(r'\{"([\w-]+)", "([\w-]+)"\}', source('validate.cpp'))
def device_of(hardware):
    """The planner's name of the hardware of a row."""
    return next(name for begins, name in DEVICES if hardware.startswith(begins))

HW = devices()
HBM_SHARE = number('problem.hpp', 'share_of_memory')   # attainable share of HBM's data sheet
PASSES = number('problem.hpp', 'passes')               # times that forward and backward move each byte that a layer keeps: counted (180 h + 30 f) / (20 h + 8 f) = 5.9
BASE = number('problem.hpp', 'kRingStart')             # NCCL tuning.cc: ring base, a step in a node (Simple), a step between nodes (x 1.4)
A_IN, A_NET = number('clusters.cpp', 'kStepInside'), number('clusters.cpp', 'kStepAcross')
HIDE = number('problem.hpp', 'overlap')                # share of the last backward that hides the reduction (DDP paper, arXiv:2006.15704: 35 to 38 %)
ADAM = 40                                                # bytes a parameter that norm, optimizer and zeroing move
LIMIT = number('validate.cpp', 'kUsable') * 80           # GiB: predicted memory above it is refused

def fold_of(ids):
    return (pd.util.hash_array(np.asarray(ids, dtype=object)) % 2).astype(int)

def quantiles(e):
    e = e[~np.isnan(e)]
    return 'n %4d  median %5.2f %%  p75 %5.1f %%  p90 %5.1f %%' % (len(e), 100*np.median(e), 100*np.quantile(e, .75), 100*np.quantile(e, .9))

# ---- stages -----------------------------------------------------------------------------------------------------------------------
def stages(layers, hidden, ffn, vocab, pp):
    """(layers, embedding, head) of each stage: the head counts as V h / (4 h^2 + 3 h f) layers and the largest stage is as small as can be."""
    if pp == 1: return [(layers, 1, 1)]
    head = vocab * hidden / (4*hidden**2 + 3*hidden*ffn)
    last = min(range(layers + 1), key=lambda x: (max(-(-(layers - x) // (pp - 1)), x + head), -x))
    each, more = divmod(layers - last, pp - 1)
    return [(each + (k < more), int(k == 0), 0) for k in range(pp - 1)] + [(last, 0, 1)]

class Rows:
    """nanotron rows as columns by stage (attribute_) and by row."""
    def __init__(s, n):
        s.df, s.n = n, len(n)
        index, part = [], []
        for i, r in enumerate(n.itertuples()):
            for k, (l, e, h) in enumerate(stages(int(r.layers), r.hidden, r.ffn, r.vocab, int(r.pp))):
                index.append(i); part.append((l, e, h, min(r.grad_acc, r.pp - k)))
        s.i = np.array(index); s.start = np.searchsorted(s.i, np.arange(s.n)); s.end = np.r_[s.start[1:], len(s.i)]
        s.nl, s.emb, s.head, s.infl = np.array(part, float).T
        for c in ('hidden', 'ffn', 'vocab', 'tp', 'pp', 'dp', 'mbs', 'seq', 'grad_acc', 'gpus', 'zero', 'tied'):
            v = n[c].values.astype(float); setattr(s, c, v); setattr(s, c + '_', v[s.i])
        h, f, V, tp = s.hidden_, s.ffn_, s.vocab_, s.tp_
        s.T = s.mbs_ * s.seq_
        both = np.where((s.tied_ == 1) & (s.pp_ == 1), np.maximum(s.emb, s.head), s.emb + s.head)
        s.P = (s.nl*(4*h*h + 3*h*f + 2*h) + both*V*h) / tp          # parameters of a rank
        s.kept = s.T*(20*h + 8*f)/tp                                # bytes that one layer keeps of one micro-batch

# ---- memory (three fitted constants) ------------------------------------------------------------------------------------------------
#   stage = P (8 + 12/z) + k (infl layers + 2) kept + v (1 + [G > 1]) head T V / tp + c (+ gathered); memory = largest stage
def mem_terms(s):
    z = np.where(s.zero_ == 1, s.dp_, 1)
    fixed = s.P*(8 + 12/z)/GIB
    gathered = (s.pp_ == 1)*s.infl*s.nl*s.T*4*s.hidden_*(1 - 1/s.tp_)/GIB
    free = np.c_[(s.infl*s.nl + 2*(s.nl > 0))*s.kept/GIB, (1 + (s.grad_acc_ > 1))*s.head*s.T*s.vocab_/s.tp_/GIB, np.ones(len(s.i))]
    return fixed, gathered, free

def mem_predict(s, x):
    fixed, gathered, free = mem_terms(s)
    v = fixed + free @ x
    most, least = np.maximum.reduceat(v + gathered, s.start), np.maximum.reduceat(v, s.start)
    return np.where(most < LIMIT, most, least), most < LIMIT

def mem_fit(s, mask):
    fixed, gathered, free = mem_terms(s)
    y, x = s.df.mem_gb.values, np.array([1.1, 4, .3])
    for _ in range(15):
        keep = mem_predict(s, x)[1]
        base = fixed + gathered*keep[s.i]
        v = base + free @ x
        top = np.array([a + np.argmax(v[a:b]) for a, b in zip(s.start, s.end)])
        for _ in range(5):                          # least absolute relative error by reweighting
            e = np.abs(free[top] @ x + base[top] - y)/y
            w = 1/y/np.sqrt(np.maximum(e, .05))
            x = nnls((free[top]*w[:, None])[mask], ((y - base[top])*w)[mask])[0]
    return x

# ---- time (four fitted constants) ---------------------------------------------------------------------------------------------------
#   x = (e, link, host, net)
def ring(n, nodes):
    """Latency of an all-gather or a reduce-scatter."""
    return np.where(n > 1, BASE + A_IN*(n - nodes) + A_NET*(nodes - 1), 0)

def time_parts(s, x):
    e, link, host, net = x
    peak, _, _, hbm, nv, node, nic, ea = HW['h100']
    h, f, V, tp, T = s.hidden_, s.ffn_, s.vocab_, s.tp_, s.T
    gemm = 6*T*(s.nl*(4*h*h + 3*h*f) + s.head*V*h)/tp/(peak*e)
    attention = 7*T*s.seq_*h*s.nl/tp/(peak*ea)
    memory = (PASSES*s.nl*s.kept + 54*s.head*T*V/tp + 12*s.P)/(hbm*HBM_SHARE)
    ops = (8*s.nl + 2*s.head)*(tp > 1)
    tpc = ops*(2*T*h*(tp - 1)/tp/np.where(tp > node, node*nic*net, nv*link) + ring(tp, np.maximum(1, tp/node)))
    apart = (s.pp_ > 1) & (s.gpus_ > node) & (tp > 1)
    cpu = host*(s.nl + 1 + s.head)*np.where(tp > 1, np.where(apart, 2 + tp, 2), 1)
    slot = np.maximum(gemm + attention + memory + tpc, cpu)        # one micro-batch, forward and backward
    most, total = np.maximum.reduceat(slot, s.start), np.add.reduceat(slot, s.start)
    P, d = np.maximum.reduceat(s.P, s.start), s.dp
    inside = s.tp*d <= node
    nodes = np.where(inside, 1, np.minimum(np.maximum(2, d*s.tp/node), d))
    bw = np.where(inside, nv*link, np.minimum(nic*net*np.maximum(1, node/np.minimum(node, s.tp)), nv*link))
    reduce = 2*((d - 1)/d*4*P/bw + (d > 1)*(ring(d, nodes) - BASE))
    gather = (d - 1)/d*2*P/bw + (d > 1)*(ring(d, nodes) - BASE)
    exposed = np.where(s.zero == 1, reduce + gather, np.maximum(reduce - HIDE*2/3*most, 0))
    adam = ADAM*P/np.where(s.zero == 1, d, 1)/(hbm*HBM_SHARE)
    return dict(step=(s.grad_acc - 1)*most + total + exposed + adam, slot=most, exposed=exposed, adam=adam)

def time_fit(s, y, mask, x0=np.array([.6, .75, 2e-3, .35])):
    go = lambda z: np.log(time_parts(s, x0*np.exp(z))['step']/y)[mask]
    return x0*np.exp(least_squares(go, np.zeros(len(x0)), loss='cauchy', f_scale=.05, bounds=(-1.5, 1.5)).x)

# ---- all other dense rows (one efficiency for each GPU and precision; the rest as above) -----------------------------------------------
def precision(s):
    s = str(s).lower()
    return 'fp4' if 'fp4' in s else 'fp8' if 'fp8' in s or 'float8' in s else 'int8' if 'int8' in s else 'bf16'

def others(d):
    o = d[(d.framework != 'nanotron') & (d.tier == 'A') & ~(d.ep.fillna(1) > 1)].copy().reset_index(drop=True)
    o['vocab'], o['vpp'], o['cp'] = o.vocab.fillna(50304), o.vpp.fillna(1), o.cp.fillna(1)
    o['prec'] = o.precision.map(precision)
    o['lw'] = 2*o.hidden**2*(1 + o.kv_heads/o.heads) + np.where(o.glu == 1, 3, 2)*o.hidden*o.ffn
    flops = 6*o.gbs*o.seq*(o.layers*o.lw + o.vocab*o.hidden) + 12*o.layers*o.hidden*o.seq**2*o.gbs
    hard = o.tflops_kind.fillna('').str.startswith('hardware') & (o.recompute == 'full')
    y = o.step_s.fillna(o.gbs*o.seq/(o.tokens_per_s_per_gpu*o.gpus)).fillna(o.gbs/o.samples_per_s)
    o['step'] = y.fillna(flops*np.where(hard, 4/3, 1)/(o.tflops_per_gpu*1e12*o.gpus))
    return o[o.step.notna()].reset_index(drop=True)

def other_step(o, e, x):
    _, link, _, net = x
    a = lambda c: o[c].values.astype(float)
    peak, k8, k4, hbm, nv, node, nic, ea = np.array([HW[device_of(h)] for h in o.hardware]).T
    k = np.where(np.isin(o.prec, ('fp8', 'int8')), k8, np.where(o.prec == 'fp4', k4, 1))
    L, h, f, V, S, G, dp, tp, cp, pp, vpp, z, lw = map(a, ('layers', 'hidden', 'ffn', 'vocab', 'seq', 'grad_acc', 'dp', 'tp', 'cp', 'pp', 'vpp', 'zero', 'lw'))
    again = (o.recompute == 'full').values*1.0
    some = o.recompute.fillna('').str.startswith('selective').values*1.0
    T, share, d = a('mbs')*S/cp, tp*pp, dp*cp
    P = (L*lw + 2*V*h)/share
    shards = np.maximum(a('shards'), 1)
    gemm = ((6 + 2*again)*T*L*lw/k + 6*T*V*h)/share/(peak*e)
    attention = (7 + 2*again + 2*some)*T*S*h*L/share/(peak*ea)
    kept = 20*h + np.where(o.glu == 1, 8, 4)*f
    memory = (PASSES*(1 + again/3)*T*L*kept/share + 54*T*V/share + 12*P)/(hbm*HBM_SHARE)
    tpc = (8 + 2*again)*L/pp*2*T*h*(tp - 1)/tp/np.where(tp > node, node*nic*net, nv*link)
    bw = np.where(d*tp <= node, nv*link, np.minimum(nic*net*np.maximum(1, np.minimum(node, 8)/np.minimum(8, tp)), nv*link))
    slot = gemm + attention + memory + tpc
    near = np.where(shards*tp <= node, nv*link, bw)
    gather = (shards - 1)/shards*2*P/near + L*(ring(shards, np.maximum(1, shards*tp/node)) - BASE*(shards > 1))
    slot = np.where(z == 3, np.maximum(slot, 3*gather), slot)       # ZeRO-3: two gathers and a scatter behind the layers
    bubble = (pp - 1)/vpp*slot*np.where(o.schedule.fillna('').str.contains('zb'), 1/3, 1)
    reduce = np.where((z != 3) & (d > 1), 2*(d - 1)/d*2*P/bw, 0)
    return G*slot + bubble + np.maximum(reduce - HIDE*2/3*slot, 0) + ADAM*P/np.where(z >= 1, shards, 1)/(hbm*HBM_SHARE)

def other_fit(o, x, mask):
    grid = np.exp(np.linspace(np.log(.1), np.log(1.2), 150))
    err = np.minimum([abs(other_step(o, e, x)/o.step.values - 1) for e in grid], .5)
    key, best = (o.hardware.map(device_of) + '/' + o.prec).values, {}
    for g in np.unique(key[mask]): best[g] = grid[np.argmin(err[:, (key == g) & mask].sum(1))]
    return best, np.array([best.get(g, np.nan) for g in key])

# ---- what is kept of it: the planner's constants, docs/planning_reference.md ---------------------------------------------------------
class Kept:
    """Rows of the page's table, and what the planner's constants must then be."""
    def __init__(s): s.rows, s.off = [('figure', 'all rows', 'one half', 'the other half', 'the planner')], []
    def constant(s, name, values, stands, digits, unit=''):
        shown = ['no row' if np.isnan(v) else '%.*f%s' % (digits, v, unit) for v in (*values, stands)]
        s.rows.append((name, *shown))
        if shown[0] != shown[3]: s.off.append('%s: the fit finds %s, the planner has %s' % (name, shown[0], shown[3]))
    def errors(s, name, inside, outside):
        at = lambda e: '%.1f %%, %.1f %%' % (100*np.median(e), 100*np.quantile(e, .9))
        s.rows.append(('error of %s (%d rows): median, nine of ten' % (name, len(inside)), at(inside), 'rows not fitted to: ' + at(outside), '', ''))
    def page(s, write):
        text = ''.join('| %s |\n%s' % (' | '.join(r), '' if i else '|---|---|---|---|---|\n') for i, r in enumerate(s.rows))
        page = ROOT / 'docs/planning_reference.md'; old = page.read_text()
        new = re.sub(r'(?<=<!-- table: fit -->\n).*?(?=<!-- end of table -->)', lambda _: text, old, count=1, flags=re.S)
        if write: page.write_text(new)
        elif new != old: s.off.append('docs/planning_reference.md has another table of the fit: --write')

def main():
    d, kept = pd.read_csv(CSV), Kept()
    nano = d[d.framework == 'nanotron']
    print('== memory, nanotron')
    ok = Rows(nano[(nano.tier == 'A') & nano.mem_gb.notna()].reset_index(drop=True))
    failed = Rows(nano[nano.tier == 'A-fail'].reset_index(drop=True))
    y, fold, every = ok.df.mem_gb.values, fold_of(ok.df.id), np.ones(ok.n, bool)
    x = mem_fit(ok, every); p = mem_predict(ok, x)[0]; pf = mem_predict(failed, x)[0]
    print('  constants k %.3f, v %.2f bytes, c %.3f GiB' % tuple(x))
    print('  all rows       ', quantiles(abs(p/y - 1)), ' refused %.2f %%, failed called too large %.2f %%' % (100*(p > LIMIT).mean(), 100*(pf > LIMIT).mean()))
    out, outf, ff, halves = np.zeros(ok.n), np.zeros(failed.n), fold_of(failed.df.id), []
    for k in (0, 1):
        xk = mem_fit(ok, fold != k); halves.append(xk); pk = mem_predict(ok, xk)[0]; out[fold == k] = pk[fold == k]; outf[ff == k] = mem_predict(failed, xk)[0][ff == k]
        print('  fold %d: %s' % (k, np.round(xk, 3)), 'in', quantiles(abs(pk/y - 1)[fold != k]), '| out', quantiles(abs(pk/y - 1)[fold == k]))
    print('  out of fold    ', quantiles(abs(out/y - 1)), ' refused %.2f %%, failed called too large %.2f %%' % (100*(out > LIMIT).mean(), 100*(outf > LIMIT).mean()))
    kept.constant('bytes that an allocator takes for a byte kept', (x[0], halves[0][0], halves[1][0]), number('problem.hpp', 'allocated'), 3)
    kept.constant('memory of libraries', (x[2], halves[0][2], halves[1][2]), number('problem.hpp', 'fixed_bytes')/GIB, 3, ' GiB')
    kept.errors('memory, nanotron', abs(p/y - 1), abs(out/y - 1))
    big = y > 10
    print('  above 10 GiB   ', quantiles(abs(out/y - 1)[big]))

    print('== time, nanotron')
    a = nano[(nano.tier == 'A') & (nano.dp*nano.mbs*nano.grad_acc == nano.gbs)].reset_index(drop=True)
    a['step'] = a.gbs*a.seq/(a.tokens_per_s_per_gpu*a.gpus)
    s, y = Rows(a), a.step.values
    twin, low = a.twin_ratio.values, (a.mem_gb.values < 74)
    use = low & (a.tp.values <= 8)
    sets = {'twin < 1.1, < 74 GiB, tp <= 8': (twin < 1.1) & use, 'twin < 1.25, tp <= 8': (twin < 1.25) & (a.tp.values <= 8),
            '  of the first, pp = 1': (twin < 1.1) & use & (a.pp.values == 1), '  of the first, pp > 1': (twin < 1.1) & use & (a.pp.values > 1),
            'MFU >= 20 %, tp <= 8': use & (a.mfu_pct.values >= 20), 'all, < 74 GiB, tp <= 8': use, 'all': np.ones(s.n, bool)}
    fold = fold_of(a.id)
    x = time_fit(s, y, use); p = time_parts(s, x)['step']
    print('  constants e %.3f, link %.3f, host %.3f ms, net %.3f' % (x[0], x[1], 1e3*x[2], x[3]))
    out, halves = np.zeros(s.n), []
    for k in (0, 1):
        xk = time_fit(s, y, use & (fold != k)); halves.append(xk); pk = time_parts(s, xk)['step']; out[fold == k] = pk[fold == k]
        m = sets['twin < 1.1, < 74 GiB, tp <= 8']
        print('  fold %d: %s' % (k, np.round(xk, 4)), 'in', quantiles(abs(pk/y - 1)[m & (fold != k)]), '| out', quantiles(abs(pk/y - 1)[m & (fold == k)]))
    for name, m in sets.items(): print('  %-32s in fold' % name, quantiles(abs(p/y - 1)[m]), ' out of fold', quantiles(abs(out/y - 1)[m]))
    for i, (name, stands, scale, digits, unit) in enumerate((('share of the peak that products reach', 'share_of_peak', 1, 3, ''), ('share of a link inside a host', 'share_inside', 1, 3, ''),
                                                             ('host for a layer of a micro-batch', 'layer_overhead', 1e3, 3, ' ms'), ('share of a network', 'share_across', 1, 3, ''))):
        kept.constant(name, [scale*v[i] for v in (x, *halves)], scale*number('problem.hpp', stands), digits, unit)
    for name, m in sets.items():
        if not name.startswith(' ') and 'MFU' not in name: kept.errors('a step, nanotron, ' + name, abs(p/y - 1)[m], abs(out/y - 1)[m])
    m = sets['twin < 1.25, tp <= 8']
    print('  band: measured / predicted, out of fold, twin < 1.25: 10 %% %.3f, 50 %% %.3f, 90 %% %.3f' % tuple(np.quantile((y/out)[m], (.1, .5, .9))))

    print('== other dense rows: one efficiency for each GPU and precision, all else from nanotron')
    o = others(d); fold = fold_of(o.id); yo = o.step.values
    best, e = other_fit(o, x, np.ones(len(o), bool)); p = other_step(o, e, x)
    out, halves = np.full(len(o), np.nan), []
    for k in (0, 1):
        found, ek = other_fit(o, x, fold != k); halves.append(found)
        pk = other_step(o, ek, x); out[fold == k] = pk[fold == k]
    print('  in fold    ', quantiles(abs(p/yo - 1))); print('  out of fold', quantiles(abs(out/yo - 1)))
    print('  efficiencies', {k: round(float(v), 2) for k, v in best.items()})
    shares = {name: (float(a), float(b)) for name, a, b in re.findall(r'\{"([\w-]+)", ([\d.]+), ([\d.]+)\}', source('published.cpp'))}
    for key in sorted(best):
        name, prec = key.split('/')
        stands = shares.get(name + ('-fp4' if prec == 'fp4' else ''), (0, 0))[prec in ('fp8', 'fp4', 'int8')]
        kept.constant('share of the peak, %s, %s' % (name, prec), [v.get(key, np.nan) for v in (best, *halves)], stands, 3)
    kept.errors('a step, all other dense rows', abs(p/yo - 1), abs(out/yo - 1)[~np.isnan(out)])
    if '--write' in sys.argv or '--check' in sys.argv: kept.page('--write' in sys.argv)
    for problem in kept.off: print('OFF', problem)
    if '--check' in sys.argv and kept.off: sys.exit(1)

def splits():
    """Out-of-fold figures over 24 random halves: how far they depend on the one split of main()."""
    d = pd.read_csv(CSV); nano = d[d.framework == 'nanotron']
    a = nano[(nano.tier == 'A') & (nano.dp*nano.mbs*nano.grad_acc == nano.gbs)].reset_index(drop=True)
    a['step'] = a.gbs*a.seq/(a.tokens_per_s_per_gpu*a.gpus)
    s, y, twin = Rows(a), a.step.values, a.twin_ratio.values
    use = (a.mem_gb.values < 74) & (a.tp.values <= 8)
    m1, m2 = (twin < 1.1) & use, (twin < 1.25) & (a.tp.values <= 8)
    ok = Rows(nano[(nano.tier == 'A') & nano.mem_gb.notna()].reset_index(drop=True)); ym = ok.df.mem_gb.values
    rows = []
    for seed in range(12):
        g = np.random.default_rng(seed); f, fm = g.integers(0, 2, s.n), g.integers(0, 2, ok.n)
        for k in (0, 1):
            x = time_fit(s, y, use & (f != k)); e = abs(time_parts(s, x)['step']/y - 1)
            xm = mem_fit(ok, fm != k); pm = mem_predict(ok, xm)[0]; em = abs(pm/ym - 1)[fm == k]
            rows.append([np.median(e[m1 & (f == k)]), np.quantile(e[m1 & (f == k)], .9), np.median(e[m2 & (f == k)]), np.quantile(e[m2 & (f == k)], .9),
                         np.median(em), np.quantile(em, .9), (pm > LIMIT)[fm == k].mean(), *x, *xm])
    print('least, median, largest of 24 halves')
    for n, c in zip(('time 1.1 median', 'time 1.1 p90', 'time 1.25 median', 'time 1.25 p90', 'memory median', 'memory p90', 'refused', 'e', 'link', 'host', 'net', 'k', 'v', 'c'), np.array(rows).T):
        print('  %-18s' % n, np.round([c.min(), np.median(c), c.max()], 4))

if __name__ == '__main__':
    splits() if '--splits' in sys.argv else main()
