"""A conformance adapter for someone else's quantiser: int8 codes, one float32 scale for each token and head.

pytest --pyargs witcert_conformance --impl my_int8_adapter:MyInt8     # from this folder"""

import numpy as np
from witcert_conformance import Account, Decoded, Info, Stored


class MyInt8:
    """Plain int8 with the half-step certificate, 2^-36 for float64. It offers nothing optional; the report says so."""

    info = Info(name="my int8", version="1.0")

    def create(self, layout, pages, calibration=None, layer=0, seed=0):
        head = pages, layout.page_size, layout.kv_heads
        k, v = (np.zeros((*head, d), np.int8) for d in (layout.head_dim, layout.head_dim_v))
        return {"k": k, "v": v, "k_scale": np.zeros(head, np.float32), "v_scale": np.zeros(head, np.float32)}

    def quantize(self, store, k, v, slots, positions):
        at = np.divmod(slots, store["k"].shape[1])
        for name, x in (("k", k), ("v", v)):
            amax = np.where(np.isfinite(x).all(-1), np.abs(x).max(-1), np.inf)  # an infinite scale marks a lost token
            scale = np.nextafter(np.maximum(amax / 127, 2.0**-40).astype(np.float32), np.float32(np.inf))
            store[name][at] = np.rint(np.nan_to_num(x / scale[..., None].astype(float)))
            store[f"{name}_scale"][at] = scale

    def stored(self, store):
        k, v, k_scale, v_scale = (x.astype(float) for x in store.values())
        return Stored(k, k_scale[..., None], v, v_scale[..., None])

    def dequantize(self, store):
        s = self.stored(store)
        return np.nan_to_num(s.codes * s.scale), np.nan_to_num(s.v_codes * s.v_scale)

    def decode(self, store, read):
        (keys, values), scales, cells = self.dequantize(store), store["k_scale"].astype(float), read.q.shape[:2]
        report = Decoded(np.zeros((*cells, values.shape[-1])), np.full(cells, -np.inf), np.zeros(cells))
        for b, h in [(b, h) for b, h in np.ndindex(cells) if read.seq_lens[b]]:
            page, offset = np.divmod(np.arange(read.seq_lens[b]), keys.shape[1])
            at = read.page_table[b, page], offset, h * keys.shape[2] // cells[1]
            lost = np.isinf(scales[at]).any() or not np.isfinite(read.q[b, h]).all()
            q = np.nan_to_num(read.q[b, h], posinf=0, neginf=0)
            y = read.sm_scale * keys[at] @ q
            c = read.sm_scale * np.abs(q).sum() * scales[at] / 2 * (1 + 2.0**-12) + 2.0**-36 * (1 + np.abs(y).max())
            report.lse[b, h] = np.logaddexp.reduce(y)
            report.out[b, h] = np.exp(y - report.lse[b, h]) @ values[at]
            report.meter[b, h] = 1.0 if lost else self.meter(y - report.lse[b, h], c)
        return report

    def meter(self, log_p, c):  # in logarithms: weights may underflow where e^c overflows
        a1, a2 = (np.exp(np.minimum(log_p + i * (c + np.log(-np.expm1(-c))), 300)).sum() for i in (1, 2))
        phi = a1 / (1 + a1) if a1 <= 1 else 1 / (1 + (2 / (1 + a1)) ** 2)
        sharp = (a1 + np.sqrt(max(a2 - a1**2, 0)) / 2) / (a1 + 2)
        return min(1.0, (min(phi, sharp, np.tanh(c.max() / 2)) + np.tanh(2.0**-36)) * (1 + 1e-9))

    def account(self, store):
        return Account(key=store["k"].shape[-1] + 4, value=store["v"].shape[-1] + 4)

    def allocated(self, store):
        return sum(x.nbytes for x in store.values())
