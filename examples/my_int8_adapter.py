"""A conformance adapter for someone else's quantiser: int8 codes, one float32 scale for each token and head.

pytest --pyargs witcert_conformance --impl my_int8_adapter:MyInt8     # from this folder
"""

import numpy as np
from witcert_conformance import Account, Decoded, Info, Stored


class MyInt8:
    """Plain int8 with the half-step certificate. It offers nothing optional, and the report says so."""

    info = Info(name="my int8", version="1.0")

    def create(self, layout, pages, calibration=None, layer=0, seed=0):
        head = (pages, layout.page_size, layout.kv_heads)
        widths = {"k": layout.head_dim, "v": layout.head_dim_v}
        store = {name: np.zeros((*head, d), np.int8) for name, d in widths.items()}
        return store | {f"{name}_scale": np.zeros(head, np.float32) for name in widths}

    def quantize(self, store, k, v, slots, positions):
        page, offset = np.divmod(slots, store["k"].shape[1])
        for name, x in (("k", k), ("v", v)):
            lost = ~np.isfinite(x).all(-1)
            x = np.where(lost[..., None], 0.0, x)
            scale = np.maximum(np.abs(x).max(-1) / 127, 2.0**-40).astype(np.float32)
            scale = np.where(scale * 127.0 < np.abs(x).max(-1), np.nextafter(scale, np.float32(np.inf)), scale)
            store[name][page, offset] = np.rint(x / scale[..., None].astype(np.float64))
            store[f"{name}_scale"][page, offset] = np.where(lost, np.inf, scale)

    def stored(self, store):
        codes, scales = (
            [store[name].astype(float) for name in names] for names in (("k", "v"), ("k_scale", "v_scale"))
        )
        return Stored(codes[0], scales[0][..., None], codes[1], scales[1][..., None])

    def dequantize(self, store):
        s = self.stored(store)
        return s.codes * np.nan_to_num(s.scale, posinf=0), s.v_codes * np.nan_to_num(s.v_scale, posinf=0)

    def decode(self, store, read):
        (k_all, v_all), scale_all = self.dequantize(store), store["k_scale"].astype(float)
        rows, heads, group = *read.q.shape[:2], read.q.shape[1] // k_all.shape[2]
        out, lse, meter = (
            np.zeros((rows, heads, v_all.shape[-1])),
            np.full((rows, heads), -np.inf),
            np.zeros((rows, heads)),
        )
        for b, h in np.ndindex(rows, heads):
            page, offset = np.divmod(np.arange(read.seq_lens[b]), k_all.shape[1])
            at = read.page_table[b, page], offset, h // group
            q, steps = np.nan_to_num(read.q[b, h], posinf=0, neginf=0), scale_all[at]
            if not len(page):
                continue
            y = read.sm_scale * k_all[at] @ q
            c = read.sm_scale * np.abs(q).sum() * np.nan_to_num(steps, posinf=0) / 2 * (1 + 2.0**-12)
            c += 2.0**-36 * (1 + np.abs(y).max())  # float64's own rounding
            p = np.exp(y - y.max())
            out[b, h], lse[b, h] = p @ v_all[at] / p.sum(), y.max() + np.log(p.sum())
            lost = np.isinf(steps).any() or not np.isfinite(read.q[b, h]).all()
            meter[b, h] = 1.0 if lost else self.meter(y - lse[b, h], c)
        return Decoded(out, lse, meter)

    def meter(self, log_p, c):
        log_rise = c + np.log(-np.expm1(-c))  # log(e^c - 1): weights may underflow where e^c overflows
        a1, a2 = (np.exp(np.minimum(log_p + i * log_rise, 300)).sum() for i in (1, 2))
        phi = a1 / (1 + a1) if a1 <= 1 else 1 / (1 + (2 / (1 + a1)) ** 2)
        sharp = (a1 + np.sqrt(max(a2 - a1**2, 0)) / 2) / (a1 + 2)
        return min(1.0, (min(phi, sharp, np.tanh(c.max() / 2)) + np.tanh(2.0**-36)) * (1 + 1e-9))

    def account(self, store):
        return Account(key=store["k"].shape[-1] + 4, value=store["v"].shape[-1] + 4)

    def allocated(self, store):
        return sum(x.nbytes for x in store.values())
