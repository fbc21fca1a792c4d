"""TEMPORARY."""
import pickle
from labkit.recording.ring_buffer import RingReader
from labkit.recording.ring_layout import *
from labkit.recording import ring_layout as L
import struct
class RingTap:
    behind=False
    def __init__(self, ring):
        self.ring=ring; self.r=RingReader(ring); self.last=b""; self.used=0
    def news(self, limit):
        head=bytes(self.ring[:L.NAMES_AT]); rec=self.r.read().tobytes()
        (used,)=struct.unpack_from("<I",self.ring,0)
        names=bytes(self.ring[L.NAMES_AT+self.used:L.NAMES_AT+used]); 
        if not rec and not names and head[4:]==self.last: return b""
        self.last=head[4:]; at=self.used; self.used=used
        return pickle.dumps((head,rec,at,names,used))
class RingCopy:
    def __init__(self, ring, clock):
        import numpy as np
        self.ring=ring; self.clock=clock; self.n=0
    def apply(self, news):
        head,rec,at,names,used=pickle.loads(news)
        self.ring[L.NAMES_AT+at:L.NAMES_AT+at+len(names)]=names
        struct.pack_into("<I",self.ring,0,used)
        B=L.RECORD_BYTES
        for i in range(0,len(rec),B):
            self.n+=1
            o=L.RECORDS_AT+(self.n & (L.CAPACITY-1))*B
            self.ring[o:o+B-8]=rec[i:i+B-8]
            L.WORD.pack_into(self.ring,o+B-8,self.n)
        self.ring[4:L.NAMES_AT]=head[4:]
