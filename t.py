import ds_ring, torch
from ds_ring.config.section import RingConfig
def t(what,f):
    try: r=f(); print(what,"->",str(r)[:200])
    except Exception as e: print(what,"=>",type(e).__name__,str(e)[:900])
t("quoted", lambda: RingConfig.from_deepspeed({"sequence_parallel_size":2,"ring_attention":{"ring_size":"2"}}))
t("quoted window", lambda: RingConfig.from_deepspeed({"sequence_parallel_size":2,"ring_attention":{"pattern":{"window":"512"}}}))
t("quoted sp", lambda: RingConfig.from_deepspeed({"sequence_parallel_size":"2","ring_attention":{}}))
t("misspelt", lambda: RingConfig.from_deepspeed({"sequence_parallel_size":2,"ring_attention":{"patern":{"window":"512"}}}))
t("top pattern", lambda: RingConfig.from_deepspeed({"sequence_parallel_size":2,"pattern":{"window":512},"ring_attention":{}}))
t("top layout", lambda: RingConfig.from_deepspeed({"sequence_parallel_size":2,"layout":"zigzag","ring_attention":{}}))
t("ids list", lambda: ds_ring.Documents([0,0,1,1]))
t("auto", lambda: ds_ring.make_layout("auto",tokens=64,ring_size=4))
t("auto", lambda: ds_ring.make_layout("auto",tokens=64,ring_size=4,pattern=ds_ring.Causal()))
t("unknown pattern", lambda: RingConfig.from_deepspeed({"sequence_parallel_size":2,"ring_attention":{"pattern":{"windw":4}}}))
