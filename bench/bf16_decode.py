"""A plain paged split-KV decode over bf16 keys and values in Triton: the baseline that has our pages and splits."""

# mypy: disable-error-code="no-untyped-def"

# isort: off
from common import SMOKE, Problem  # before Triton
import torch
import triton
import triton.language as tl
# isort: on


@triton.jit
def _read_kernel(
    Q, K, V, Table, Lengths, Acc, M, L, max_pages, total, scale, KV: tl.constexpr, PER_HEAD: tl.constexpr,
    PAGE: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """A split of a sequence for the heads of a kv head; logits in base 2."""
    sequence, kv_head, split, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    head, channel, within = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, PAGE)
    row, row_ok = (sequence * KV + kv_head) * PER_HEAD + head, head < PER_HEAD
    q = tl.load(Q + row[:, None] * D + channel[None, :], mask=row_ok[:, None], other=0.0)
    length = tl.load(Lengths + sequence)
    pages = tl.cdiv(tl.cdiv(length, PAGE), splits)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((ROWS,), tl.float32)  # noqa: E741
    acc = tl.zeros((ROWS, D), tl.float32)
    for page in range(split * pages, tl.minimum((split + 1) * pages, tl.cdiv(length, PAGE))):
        here = page * PAGE + within < length
        slot = tl.load(Table + sequence * max_pages + page).to(tl.int64)
        at = ((slot * PAGE + within) * KV + kv_head)[:, None] * D + channel[None, :]
        k = tl.load(K + at, mask=here[:, None], other=0.0)
        v = tl.load(V + at, mask=here[:, None], other=0.0)
        if INTERPRET:
            y = tl.dot(q.to(tl.float32), tl.trans(k.to(tl.float32))) * scale
        else:
            y = tl.dot(q, tl.trans(k)) * scale
        y = tl.where(here[None, :], y, float("-inf"))
        newer = tl.maximum(m, tl.max(y, 1))
        p, factor = tl.exp2(y - newer[:, None]), tl.exp2(m - newer)
        l = l * factor + tl.sum(p, 1)  # noqa: E741
        if INTERPRET:
            acc = acc * factor[:, None] + tl.dot(p, v.to(tl.float32))
        else:
            acc = acc * factor[:, None] + tl.dot(p.to(v.dtype), v)
        m = newer
    slot = split.to(tl.int64) * total + row
    tl.store(Acc + slot[:, None] * D + channel[None, :], acc, mask=row_ok[:, None])
    tl.store(M + slot, m, mask=row_ok)
    tl.store(L + slot, l, mask=row_ok)


@triton.jit
def _merge_kernel(Acc, M, L, Out, total, splits, D: tl.constexpr, SP: tl.constexpr):
    row, split, channel = tl.program_id(0), tl.arange(0, SP), tl.arange(0, D)
    present = split < splits
    slot = split.to(tl.int64) * total + row
    m = tl.load(M + slot, mask=present, other=float("-inf"))
    weight = tl.exp2(m - tl.max(m, 0))
    l = tl.sum(weight * tl.load(L + slot, mask=present, other=0.0), 0)  # noqa: E741
    part = tl.load(Acc + slot[:, None] * D + channel[None, :], mask=present[:, None], other=0.0)
    tl.store(Out + row * D + channel, (tl.sum(part * weight[:, None], 0) / l).to(Out.dtype.element_ty))


class Bf16Decode:
    """The decode of a :class:`Problem`, its keys and values copied into bf16 pages in its table's order."""

    def __init__(self, problem: Problem) -> None:
        self.problem, shape = problem, problem.shape
        paged = (shape.batch * shape.length // shape.page, shape.page, shape.kv_heads, shape.dim)
        self.k, self.v = (x.transpose(1, 2).reshape(paged).contiguous() for x in (problem.k, problem.v))
        self.total, self.splits = shape.batch * shape.heads, problem.plan.splits
        self.acc = problem.q.new_empty(self.splits, self.total, shape.dim, dtype=torch.float32)
        self.m, self.l = (self.acc.new_empty(self.splits, self.total) for _ in range(2))

    def __call__(self) -> torch.Tensor:
        """out ``[batch, heads, d]``."""
        problem, shape = self.problem, self.problem.shape
        out = torch.empty_like(problem.q)
        per_head = shape.heads // shape.kv_heads
        _read_kernel[(shape.batch, shape.kv_heads, self.splits)](
            problem.q, self.k, self.v, problem.table, problem.lengths, self.acc, self.m, self.l,
            problem.table.shape[1], self.total, shape.dim**-0.5 * 1.4426950408889634, KV=shape.kv_heads,
            PER_HEAD=per_head, PAGE=shape.page, D=shape.dim, ROWS=max(16, triton.next_power_of_2(per_head)),
            INTERPRET=SMOKE, num_warps=4, num_stages=3,
        )  # fmt: skip
        _merge_kernel[(self.total,)](
            self.acc, self.m, self.l, out, self.total, self.splits, D=shape.dim,
            SP=triton.next_power_of_2(self.splits), num_warps=4,
        )  # fmt: skip
        return out
