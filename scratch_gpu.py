import sys, os, warnings, time, statistics, copy
sys.path[:0]=["src","benchmarks","."]
os.makedirs("/tmp/meta/neuromanifold-0.1.0.dist-info",exist_ok=True)
open("/tmp/meta/neuromanifold-0.1.0.dist-info/METADATA","w").write("Metadata-Version: 2.1\nName: neuromanifold\nVersion: 0.1.0\n")
sys.path.append("/tmp/meta")
import torch
import neuromanifold as nm
from neuromanifold.reference import network as reference
warnings.simplefilter("ignore")
from tests.run.networks import PROBLEMS
from tests.run.architectures import ARCHITECTURES
dev=torch.device("cuda")
def to(v):
    if isinstance(v,dict): return {k:to(x) for k,x in v.items()}
    if isinstance(v,(list,tuple)): return type(v)(to(x) for x in v)
    return v.to(dev) if isinstance(v,torch.Tensor) else v
for name,p in {**PROBLEMS,**ARCHITECTURES}.items():
    try:
        exp=reference.fisher_diagonal(p.model,p.forward,p.likelihood)
        m=copy.deepcopy(p.model).to(dev)
        r=nm.fisher_diagonal(m,[to(b) for b in p.data],nm.Exact(),p.likelihood,reduction="sum",**p.options).to("cpu")
        err=max(float((r[k]-v).abs().max()/(v.abs().max()+1e-30)) for k,v in exp.items())
        slow=[k for k,v in r.provenance.granularity.items() if v!="sample"]
        if err>1e-10 or slow: print(f"{name:32s} {err:.1e}",slow,flush=True)
    except Exception as e: print(name,"FAILED",type(e).__name__,str(e)[:300],flush=True)
from models import CASES, Case
import torch.nn.functional as F
def med(fs,rep=5):
    ts={k:[] for k in fs}
    for _ in range(rep):
        for k,f in fs.items():
            f(); torch.cuda.synchronize(); t=time.perf_counter(); f(); torch.cuda.synchronize(); ts[k].append(time.perf_counter()-t)
    return {k:statistics.median(v) for k,v in ts.items()}
for name,C in (("MLP",10),("ResNet-18-like",100),("DistilBERT",2),("DistilBERT",14)):
    c=CASES[name](C,large=True); m=c.model.to(dev).eval(); x=to(c.batch); y=torch.randint(0,C,(c.samples,),device=dev)
    b={**x,"labels":y} if isinstance(x,dict) else (x,y)
    for prec in ("fp32","tf32","bf16"):
        torch.backends.cuda.matmul.allow_tf32=prec=="tf32"; torch.backends.cudnn.allow_tf32=prec=="tf32"
        mm=copy.deepcopy(m).bfloat16() if prec=="bf16" else m
        bb=b
        if prec=="bf16" and not isinstance(x,dict): bb=(x.bfloat16(),y)
        xx=bb if isinstance(b,dict) else bb[0]
        k=8
        def plain():
            for _ in range(k):
                mm.zero_grad(set_to_none=True)
                o=mm(**{q:v for q,v in xx.items() if q!="labels"}) if isinstance(xx,dict) else mm(xx); o=getattr(o,"logits",o)
                F.cross_entropy(o.float(),y,reduction="sum").backward()
        t=med({"plain":plain,"batch":lambda: nm.fisher_diagonal(mm,[bb]*k,nm.Hutchinson(),granularity="batch"),"defl":lambda: nm.fisher_diagonal(mm,[bb]*k,nm.Hutchinson(deflate=1)),"emp":lambda: nm.fisher_diagonal(mm,[bb]*k,nm.Empirical())})
        torch.cuda.reset_peak_memory_stats(); plain(); a=torch.cuda.max_memory_allocated(); mm.zero_grad(set_to_none=True); torch.cuda.reset_peak_memory_stats(); nm.fisher_diagonal(mm,[bb]*k,nm.Hutchinson(deflate=1)); d=torch.cuda.max_memory_allocated()
        print(name,C,prec,{q:round(v/t["plain"],2) for q,v in t.items()},f"{1e3*t['plain']/k:.1f} ms mem {a/2**30:.2f} {d/2**30:.2f}",flush=True)
