"""The weight gradient's kernels on a GPU: ragged groups next to NaN, in every form of operands and result."""

import itertools

import pytest
import torch
from compare import assert_bitwise, assert_close
from marks import on_cuda

pytestmark = on_cuda

NAN = float("nan")
FEW = (0, 1, 63, 64, 65, 0, 130, 300, 7, 0)  # steps of the contraction: none, one that is cut, whole ones
MANY = (4100, 0, 1023, 2049)
SHAPES = [(200, 264), (128, 256), (8, 8), (520, 136)]  # tiles that are cut, one that is whole


@pytest.fixture
def wgrad(module):
    """wgrad(p, p_top_k, q, q_top_k, row_to_slot, offsets, dw): a top_k above 0 gathers that operand."""
    backend, rows_type = module("backends.triton"), module("rows").Rows

    def launch(p, p_top_k, q, q_top_k, row_to_slot, offsets, dw, accumulate=False):
        num_rows = p.shape[0] if row_to_slot is None else row_to_slot.shape[0]
        rows = rows_type(offsets, dw.shape[0], num_rows, top_k=p_top_k + q_top_k, row_to_slot=row_to_slot)
        gathered = {"lhs_of_tokens": p_top_k > 0, "rhs_of_tokens": q_top_k > 0}
        backend.wgrad(p, q, rows, dw, **gathered, accumulate=accumulate)

    return launch


def rows_of(count: int, total: int, width: int, dtype: torch.dtype, extra: int = 8) -> torch.Tensor:
    """Unit-scale rows of so many, then NaN, in wider memory full of NaN."""
    memory = torch.full((total, width + extra), NAN, dtype=dtype, device="cuda")
    memory[:count, :width].normal_()
    return memory[:, :width]


def guarded_dw(shape, dtype: torch.dtype, value: float):
    """(memory full of 7, dw of another value within it)."""
    memory = torch.full((shape[0] + 2, shape[1] + 8, shape[2] + 16), 7.0, dtype=dtype, device="cuda")
    dw = memory[1:-1, : shape[1], : shape[2]]
    dw.fill_(value)
    return memory, dw


def is_untouched(memory: torch.Tensor, dw: torch.Tensor) -> bool:
    dw.fill_(7.0)
    return bool((memory == 7.0).all())


def offsets_of(sizes) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device="cuda")


def expected(p, q, sizes, old=None):
    """In fp64, group by group."""
    parts = [a.double().t() @ b.double() for a, b in zip(p.split(sizes), q.split(sizes))]
    return torch.stack(parts) if old is None else torch.stack(parts) + old.double()


@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("m, n", SHAPES, ids=lambda size: str(size))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_ragged(wgrad, sizes, m, n, dtype):
    """dw in guarded memory; the rows of any one group stand between NaN, with the other groups and without."""
    used, offsets = sum(sizes), offsets_of(sizes)
    p, q = rows_of(used, used + 70, m, dtype), rows_of(used, used + 70, n, dtype)
    memory, dw = guarded_dw((len(sizes), m, n), dtype, NAN)
    wgrad(p, 0, q, 0, None, offsets, dw)
    want, one = expected(p[:used], q[:used], sizes), torch.full((1, m, n), NAN, dtype=dtype, device="cuda")
    assert_close("dw", dw, want, dtype)
    first = dw.clone()
    assert is_untouched(memory, dw)
    for group, (start, size) in enumerate(zip(offsets.tolist(), sizes)):
        alone = [torch.full_like(rows, NAN) for rows in (p, q)]
        for rows, source in zip(alone, (p, q)):
            rows[start : start + size] = source[start : start + size]
        wgrad(alone[0], 0, alone[1], 0, None, offsets, dw)
        assert_bitwise(f"dw[{group}]", dw[group], first[group])
        wgrad(alone[0], 0, alone[1], 0, None, offsets[group:], one)
        assert_close(f"dw[{group}] alone", one, want[group : group + 1], dtype)


@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("dw_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("transposed", [False, True], ids=["mn", "nm"])
def test_accumulates(wgrad, sizes, dw_dtype, transposed):
    """dw += in dw's own dtype; a group without rows keeps what it has, NaN too."""
    m, n = (520, 264) if transposed else (264, 520)
    used, offsets = sum(sizes), offsets_of(sizes)
    p, q = rows_of(used, used + 3, 264, torch.bfloat16), rows_of(used, used + 3, 520, torch.bfloat16)
    memory, dw = guarded_dw((len(sizes), 264, 520), dw_dtype, 0.0)
    dw.normal_()
    old = dw.clone()
    if transposed:
        wgrad(q, 0, p, 0, None, offsets, dw.transpose(1, 2), accumulate=True)
    else:
        wgrad(p, 0, q, 0, None, offsets, dw, accumulate=True)
    assert_close("dw", dw, expected(p[:used], q[:used], sizes, old), dw_dtype, terms=max(sizes))
    dw.fill_(NAN)
    wgrad(p, 0, q, 0, None, offsets, dw, accumulate=True)
    assert bool(dw.isnan().all()) and is_untouched(memory, dw)


@pytest.mark.parametrize("case", ["p-columns", "dw-columns", "dw-offset", "odd"])
def test_misaligned(wgrad, case):
    """What descriptors cannot take goes another way."""
    sizes, m, n = FEW, *((197, 263) if case == "odd" else (200, 264))
    used = sum(sizes)
    p = rows_of(used, used, m, torch.bfloat16, extra=1 if case == "p-columns" else 8)
    q = rows_of(used, used, n, torch.bfloat16)
    width = n + (3 if case == "dw-columns" else 0)
    memory = torch.full((len(sizes) * m * width + 1,), NAN, dtype=torch.bfloat16, device="cuda")
    dw = memory[case == "dw-offset" :][: len(sizes) * m * width].view(len(sizes), m, width)[..., :n]
    wgrad(p, 0, q, 0, None, offsets_of(sizes), dw)
    assert_close("dw", dw, expected(p, q, sizes), torch.bfloat16)


@pytest.mark.parametrize("p_gathered", [False, True], ids=["q", "p"])
@pytest.mark.parametrize(
    "sizes",
    [(200, 0, 130, 300, 65, 1023), (1300, 0, 1023, 2049), (127, 128, 129, 0, 0, 32, 256, 257, 31, 33, 1)],
    ids=["few", "many", "around a turn"],
)
@pytest.mark.parametrize("m, n", [(200, 264), (264, 200), (128, 256)], ids=lambda size: str(size))
def test_gathered(wgrad, p_gathered, sizes, m, n):
    """Rows of no group have no slot; tokens that no row has are NaN, and so are other groups' tokens and rows."""
    used, top_k, tokens = sum(sizes), 3, 3000
    offsets = offsets_of(sizes)
    slots = torch.randperm(tokens * top_k, device="cuda")[:used].int()
    row_to_slot = torch.cat([slots, slots.new_full((70,), 2**31 - 1)])
    sources = (slots // top_k).long()
    x = rows_of(tokens, tokens, m if p_gathered else n, torch.bfloat16)
    x[~torch.zeros(tokens, dtype=torch.bool, device="cuda").index_fill_(0, sources, True)] = NAN
    rows = rows_of(used, used + 70, n if p_gathered else m, torch.bfloat16)
    memory, dw = guarded_dw((len(sizes), m, n), torch.bfloat16, NAN)

    def launch(x, rows):
        operands = (x, top_k, rows, 0) if p_gathered else (rows, 0, x, top_k)
        wgrad(*operands, row_to_slot, offsets, dw)

    launch(x, rows)
    pair = (x[sources], rows[:used]) if p_gathered else (rows[:used], x[sources])
    assert_close("dw", dw, expected(*pair, sizes), torch.bfloat16)
    first = dw.clone()
    assert is_untouched(memory, dw)
    for group, (start, size) in enumerate(zip(offsets.tolist(), sizes)):
        alone_x, alone_rows = torch.full_like(x, NAN), torch.full_like(rows, NAN)
        mine = sources[start : start + size]
        alone_x[mine] = x[mine]
        alone_rows[start : start + size] = rows[start : start + size]
        launch(alone_x, alone_rows)
        assert_bitwise(f"dw[{group}]", dw[group], first[group])


# Sizes of groups, M and N. Persistent programs go from tile to tile and from group to group, whose sizes differ; those
# with a tile of a long group get fewer of the others' (or, if there is one for each, as many).
TILES = [5, 300, 0, 64, 0, 33, 700, 1, 96, 0, 31, 128]
SCHEDULES = {
    "more groups than are ordered": ([(37 * group) % 90 for group in range(150)], 136, 128),
    "few tiles": (TILES, 1032, 1544),
    "many tiles": ([6 * size for size in TILES], 1032, 1544),
}
for longs in (1, 7, 33):
    groups = range(128)
    sizes = [3940 + group if 60 <= group < 60 + longs else (7 * group) % 20 for group in groups]
    SCHEDULES[f"{longs} long"] = (sizes, 256, 512)


@pytest.mark.parametrize("sizes, m, n", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("gathered", [False, True], ids=["in-place", "gathered"])
def test_schedules(wgrad, gathered, sizes, m, n):
    used = sum(sizes)
    rows, x = rows_of(used, used + 70, m, torch.bfloat16), rows_of(used, used + 70, n, torch.bfloat16)
    sources = torch.randperm(used, device="cuda")
    operands = (rows, 0, x, 1, sources.int()) if gathered else (rows, 0, x, 0, None)
    dw = torch.full((len(sizes), m, n), NAN, dtype=torch.bfloat16, device="cuda")
    wgrad(*operands, offsets_of(sizes), dw)
    assert_close("dw", dw, expected(rows[:used], x[sources] if gathered else x[:used], sizes), torch.bfloat16)
