import torch, nc, os, itertools, warnings, sys; warnings.simplefilter('ignore'); torch.set_num_threads(1)
class M(torch.nn.Module):
    def __init__(s,op,after): super().__init__(); s.op,s.after=op,after; s.l=torch.nn.Linear(8 if after=='lin' else 32,16)
    def forward(s,a,b,m):
        y=a@b; y=y*m if s.op=='mul' else y+m
        if s.after=='lin': return s.l(y)
        if s.after=='tlin': return s.l(y.transpose(1,2).flatten(2))
        if s.after=='t': return y.transpose(1,2)
        return y
def one(op,after,pat):
    torch.manual_seed(0); L=5
    size=[d if k else 1 for d,k in zip((3,4,L,8),pat)]
    ex=(torch.rand(3,4,L,6),torch.randn(3,6,4,8).transpose(1,2),torch.rand(*size)+.2)
    m=M(op,after).eval()
    p=nc.prepare(m,nc.StaticQuantConfig(),example_inputs=ex,backend='native'); p(*ex)
    q=nc.convert(p,measure=False,verify='off'); r=nc.convert(p,backend='reference',measure=False)
    worst=999
    for _ in range(2):
        x,y=q(*ex),r(*ex); n=(x-y).pow(2).sum(); worst=min(worst,999 if n==0 else float(10*torch.log10(y.pow(2).sum()/n)))
    return worst
bad={}
for after in ('tlin','lin','t','none'):
  for op in ('mul','add'):
    out=[]
    for pat in itertools.product((0,1),repeat=4):
        rd,wr=os.pipe(); pid=os.fork()
        if not pid:
            try: s=f'{one(op,after,pat):.0f}'
            except BaseException as e: s=type(e).__name__+str(e)[:60]
            os.write(wr,s.encode()); os._exit(0)
        os.close(wr); _,st=os.waitpid(pid,0); s=os.read(rd,99).decode(); os.close(rd)
        out.append(''.join(map(str,pat))+':'+(s if st==0 else f'CRASH{st}'))
    print(after,op,*out,flush=True)
