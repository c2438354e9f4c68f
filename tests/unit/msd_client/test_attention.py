"""Packed attention through every helper equals attention of each document alone (E5)."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from msd_client.attention import PackedSeqParams
from msd_client.batch import Batch
from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.errors import UsageError
from tests.support.microbatches import Document, build_batches, place_rows

torch = pytest.importorskip("torch")
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

HEADS, WIDTH = 2, 4
TOLERANCE = 1e-10
"""Far below the 1e-5 that is asked for: everything is computed in float64."""

ROWS = {
    "row joins": (1, 8, [[3, 5], [2, 4, 2]]),
    "padded rows": (1, 8, [[3], [], [2, 2]]),
    "documents of one token": (1, 8, [[1, 1, 1, 5], [1]]),
    "a document as long as its row": (1, 16, [[16], [7]]),
    "segments in multiples": (8, 32, [[5, 3, 16], [1, 2, 9], [17]]),
    "one segment in many places": (16, 32, [[1], [16, 1]]),
}


@dataclasses.dataclass
class Case:
    """Queries, keys and values of a microbatch, by place, and where its documents lie."""

    spec: BatchSpec
    batches: list[Batch]
    spans: list[tuple[int, int]]
    inputs: tuple[Any, Any, Any]
    """float64, shape (places, heads, width); leaves."""

    @property
    def batch(self) -> Batch:
        (batch,) = self.batches
        return batch

    @property
    def real(self) -> Any:
        """Places that hold a token."""
        return torch.cat([torch.arange(start, end) for start, end in self.spans])


def make_case(name: str, **rule: Any) -> Case:
    multiple, row_tokens, lengths = ROWS[name]
    rule = {"segment_multiple": multiple} | rule
    spec = BatchSpec.for_rule(rows=len(lengths), row_tokens=row_tokens, row_segments_max=8, **rule)
    numbers = itertools.count(1)
    rows = [[Document([next(numbers) for _ in range(n)]) for n in row] for row in lengths]
    spans = [
        (row * row_tokens + column, row * row_tokens + column + len(document.tokens))
        for document, row, column in place_rows(rows, spec)
    ]
    generator = torch.Generator().manual_seed(3)
    shape = (len(lengths) * row_tokens, HEADS, WIDTH)
    inputs = tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(3)
    )
    return Case(spec, build_batches(spec, rows), spans, inputs)


def attend(query: Any, key: Any, value: Any) -> Any:
    """Return causal attention of one document, written out. Shapes (tokens, heads, width)."""
    scores = torch.einsum("qhw,khw->hqk", query, key) / WIDTH**0.5
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khw->qhw", weights, value)


def by_document(case: Case) -> Any:
    """Return the right results of the real places, in their order."""
    return torch.cat([attend(*(x[a:b] for x in case.inputs)) for a, b in case.spans])


# ---- kernels that take what the helpers give ----


def plain_varlen(
    query: Any,
    key: Any,
    value: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Any:
    """Do what `flash_attn_varlen_func(causal=True)` does. Shapes (places, heads, width)."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    parts = []
    for a, b in itertools.pairwise(cu_seqlens_q.tolist()):
        assert b - a <= max_seqlen_q == max_seqlen_k
        parts.append(attend(query[a:b], key[a:b], value[a:b]))
    assert cu_seqlens_q.tolist() == cu_seqlens_k.tolist()
    return torch.cat(parts)


def plain_thd(ranks: Sequence[tuple[Any, Any, Any]], params: Any) -> list[Any]:
    """Do what TransformerEngine does with `thd`, causal padding masks and context parallelism.

    Args:
        ranks: Queries, keys and values of each rank. Shapes (places / ranks, heads, width).
        params: PackedSeqParams of the whole microbatch.
    """
    assert params.qkv_format == "thd"
    cp_count = len(ranks)
    outputs = [torch.zeros_like(query) for query, _, _ in ranks]
    lengths = np.diff(params.cu_seqlens_q.numpy())
    for length, (a, b) in zip(
        lengths, itertools.pairwise(params.cu_seqlens_q_padded.tolist()), strict=True
    ):
        assert length <= b - a <= params.max_seqlen_q
        chunk = (b - a) // (2 * cp_count)
        order = [c for rank in range(cp_count) for c in (rank, 2 * cp_count - 1 - rank)]
        own = slice(a // cp_count, b // cp_count)
        if cp_count == 1:
            whole = [x[own] for x in ranks[0]]
        else:
            parts = [
                torch.cat([rank[x][own] for rank in ranks]).split(chunk) if chunk else []
                for x in range(3)
            ]
            whole = [torch.cat([p[order.index(c)] for c in range(2 * cp_count)]) for p in parts]
        out = torch.zeros_like(whole[0])
        out[:length] = attend(*(x[:length] for x in whole))
        if cp_count == 1:
            outputs[0][own] = out
            continue
        for rank in range(cp_count):
            first, last = rank * chunk, (2 * cp_count - 1 - rank) * chunk
            mine = torch.cat([out[first : first + chunk], out[last : last + chunk]])
            outputs[rank][own] = mine
    return outputs


def from_places(x: Any, places: Any) -> Any:
    """Return (rows, heads, length, width) of (places, heads, width)."""
    return x[places].permute(0, 2, 1, 3)


def put_back(case: Case, outputs: list[Any]) -> Any:
    """Return (places, heads, width) of every rank's (rows, heads, length, width)."""
    whole = torch.full(case.inputs[0].shape, float("nan"), dtype=torch.float64)
    for batch, output in zip(case.batches, outputs, strict=True):
        places = batch.cp_places.reshape(-1)
        flat = output.permute(0, 2, 1, 3).reshape(-1, HEADS, WIDTH)
        whole = whole.index_put((places.long(),), flat)
    assert not whole.isnan().any(), "every place is some rank's, and no query sees nothing"
    return whole


def through_ranks(case: Case, layout: str, kernel: Callable[[Batch, Any, Any, Any], Any]) -> Any:
    """Run a kernel on every rank with the keys and values that an all-gather gives."""

    def mine(x: Any, batch: Batch) -> Any:
        places = batch.cp_places
        return from_places(x, places.reshape(1, -1) if layout == "flat" else places)

    query, key, value = case.inputs
    keys, values = (
        torch.cat([mine(x, batch) for batch in case.batches], dim=2) for x in (key, value)
    )
    outputs = []
    for batch in case.batches:
        output = kernel(batch, mine(query, batch), keys, values)
        if layout == "flat":
            rows, length = batch.cp_places.shape
            output = output.reshape(HEADS, rows, length, WIDTH).swapaxes(0, 1)
        outputs.append(output)
    return put_back(case, outputs)


def sdpa(case: Case, layout: str, dtype: Any = bool) -> Any:
    return through_ranks(
        case,
        layout,
        lambda batch, q, k, v: scaled_dot_product_attention(
            q, k, v, attn_mask=batch.sdpa_mask(dtype, layout=layout)
        ),
    )


def flex(case: Case, layout: str, block_size: int = 128) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return through_ranks(
        case,
        layout,
        lambda batch, q, k, v: flex_attention(
            q, k, v, block_mask=batch.flex_block_mask(layout=layout, block_size=block_size)
        ),
    )


def flash(case: Case) -> Any:
    return plain_varlen(*case.inputs, **case.batch.flash_kwargs())


def thd(case: Case) -> Any:
    ranks = [tuple(x[batch.cp_places.reshape(-1)] for x in case.inputs) for batch in case.batches]
    outputs = plain_thd(ranks, case.batches[0].packed_seq_params())
    rows, length = case.batches[0].cp_places.shape
    return put_back(
        case, [o.reshape(rows, length, HEADS, WIDTH).permute(0, 2, 1, 3) for o in outputs]
    )


HELPERS: dict[str, Callable[[Case], Any]] = {
    "sdpa rows": lambda case: sdpa(case, "rows"),
    "sdpa flat": lambda case: sdpa(case, "flat"),
    "sdpa added": lambda case: sdpa(case, "rows", torch.float64),
    "flash": flash,
    "thd": thd,
}
WITH_CP = [name for name in HELPERS if name.startswith("sdpa")]


def check_forward(case: Case, result: Any) -> None:
    right = by_document(case)
    assert (result[case.real] - right).abs().max() < TOLERANCE


def check_gradients(case: Case, run: Callable[[Case], Any]) -> None:
    weight = torch.randn(
        case.inputs[0].shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )[case.real]
    right = torch.autograd.grad((by_document(case) * weight).sum(), case.inputs)
    found = torch.autograd.grad((run(case)[case.real] * weight).sum(), case.inputs)
    for want, have in zip(right, found, strict=True):
        assert want.abs().max() > 0.1
        assert (want - have).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("boundaries", "documents"), [("exact", "separate"), ("constant", "joined")]
)
@pytest.mark.parametrize("helper", HELPERS)
@pytest.mark.parametrize("name", ROWS)
def test_every_helper_equals_attention_of_each_document(
    name: str, helper: str, boundaries: str, documents: str
) -> None:
    case = make_case(name, boundaries=boundaries, documents=documents)
    check_forward(case, HELPERS[helper](case))
    check_gradients(case, HELPERS[helper])


LAYOUTS = ["zigzag_row", "zigzag_document", "contiguous"]
CP_ROWS = ["segments in multiples", "one segment in many places"]


@pytest.mark.parametrize("helper", WITH_CP)
@pytest.mark.parametrize("cp_count", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CP_ROWS)
def test_context_parallel_masks_equal_attention_of_each_document(
    name: str, layout: str, cp_count: int, helper: str
) -> None:
    case = make_case(name, cp_count=cp_count, cp_layout=layout)
    check_forward(case, HELPERS[helper](case))
    check_gradients(case, HELPERS[helper])


@pytest.mark.parametrize("layout", ["zigzag_row", "contiguous"])
def test_context_parallel_masks_need_no_multiples_of_segments(layout: str) -> None:
    case = make_case("row joins", cp_count=4, cp_layout=layout)
    check_forward(case, sdpa(case, "rows"))
    check_gradients(case, lambda case: sdpa(case, "flat"))


@pytest.mark.parametrize("cp_count", [1, 2, 4])
@pytest.mark.parametrize("name", CP_ROWS)
def test_packed_sequences_dealt_by_document_equal_attention_of_each(
    name: str, cp_count: int
) -> None:
    case = make_case(name, cp_count=cp_count, cp_layout="zigzag_document")
    check_forward(case, thd(case))
    check_gradients(case, thd)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("layout", ["rows", "flat"])
@pytest.mark.parametrize("name", ROWS)
def test_flex_attention_equals_attention_of_each_document(name: str, layout: str) -> None:
    case = make_case(name)
    with torch.no_grad():
        check_forward(case, flex(case, layout))
        check_forward(case, flex(case, layout, block_size=8))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("cp_count", [2, 4])
@pytest.mark.parametrize("cp_layout", LAYOUTS)
def test_flex_attention_of_context_parallel_ranks(cp_layout: str, cp_count: int) -> None:
    case = make_case("segments in multiples", cp_count=cp_count, cp_layout=cp_layout)
    with torch.no_grad():
        check_forward(case, flex(case, "rows"))
        check_forward(case, flex(case, "flat", block_size=8))


def test_masks_of_a_middle_stage_are_those_of_the_whole() -> None:
    for cp_count in (1, 2):
        rule = {"cp_count": cp_count, "cp_layout": "zigzag_document"}
        whole = make_case("segments in multiples", **rule).batches
        middle = make_case("segments in multiples", stage="middle", **rule).batches
        for left, right in zip(whole, middle, strict=True):
            assert "tokens" not in right
            assert torch.equal(left.sdpa_mask(), right.sdpa_mask())


# ---- forms ----


def test_kernels_of_transformers_get_their_own_names() -> None:
    batch = make_case("segments in multiples").batch
    assert batch.flash_kwargs("transformers") == {
        "cu_seq_lens_q": batch.cu_seqlens_padded,
        "cu_seq_lens_k": batch.cu_seqlens_padded,
        "max_length_q": 24,
        "max_length_k": 24,
    }
    assert type(batch.flash_kwargs()["max_seqlen_q"]) is int
    with pytest.raises(UsageError, match="neither flash_attn nor transformers"):
        batch.flash_kwargs("eager")


def test_shapes_and_kinds_of_masks() -> None:
    case = make_case("segments in multiples", cp_count=2)
    batch = case.batches[1]
    assert batch.sdpa_mask().shape == (3, 1, 16, 32)
    assert batch.sdpa_mask(layout="flat").shape == (1, 1, 48, 96)
    assert batch.sdpa_mask(torch.bool).dtype == torch.bool
    assert batch.sdpa_mask(torch.float32).dtype == torch.float32
    assert batch.flex_block_mask().shape == (3, 1, 16, 32)
    assert batch.flex_block_mask(layout="flat").shape == (1, 1, 48, 96)


def test_block_masks_are_compiled_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import flex_attention

    create, asked = flex_attention.create_block_mask, []

    def record(*arguments: Any, _compile: bool, **options: Any) -> Any:
        asked.append(_compile)
        return create(*arguments, **options)

    monkeypatch.setattr(flex_attention, "create_block_mask", record)
    batch = make_case("row joins").batch
    batch.flex_block_mask()
    assert batch.flex_block_mask(is_compiled=True).shape == (2, 1, 8, 8)
    assert asked == [False, True]


def test_masks_of_what_they_cannot_be_made_of_are_refused() -> None:
    batch = make_case("row joins").batch
    with pytest.raises(UsageError, match="neither rows nor flat"):
        batch.sdpa_mask(layout="columns")
    with pytest.raises(UsageError, match=r"dtype torch.int32 of a mask"):
        batch.sdpa_mask(torch.int32)
    with pytest.raises(UsageError, match=r"sdpa_mask\(\) of numpy arrays"):
        batch.numpy().sdpa_mask()
    with pytest.raises(UsageError, match=r"flex_block_mask\(\) of numpy arrays"):
        batch.numpy().flex_block_mask()
    assert batch.numpy().flash_kwargs()["cu_seqlens_q"].tolist() == [0, 3, 8, 10, 14, 16]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernels_that_know_no_slices_are_refused_with_those_that_do(layout: str) -> None:
    batch = make_case("segments in multiples", cp_count=2, cp_layout=layout).batches[0]
    with pytest.raises(UsageError, match=r"packed_seq_params\(\) .* sdpa_mask\(\) .* flex_block"):
        batch.flash_kwargs()
    if layout != "zigzag_document":
        with pytest.raises(
            UsageError, match="cp_layout: zigzag_document and a segment_multiple of 4"
        ):
            batch.packed_seq_params()


def test_packed_parameters_have_both_boundaries() -> None:
    params = make_case("segments in multiples").batch.packed_seq_params()
    assert type(params) is PackedSeqParams
    assert params.cu_seqlens_q is params.cu_seqlens_kv
    assert params.cu_seqlens_q.tolist() == [0, 5, 8, 24, 25, 27, 36, 53, 61]
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded
    assert params.cu_seqlens_q_padded.tolist() == [0, 8, 16, 32, 40, 48, 64, 88, 96]
    assert params.max_seqlen_q == params.max_seqlen_kv == 24
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.qkv_format = "bshd"


def test_megatrons_own_class_is_taken_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclasses.dataclass
    class MegatronParams:
        qkv_format: str | None = None
        cu_seqlens_q: Any = None
        cu_seqlens_kv: Any = None
        cu_seqlens_q_padded: Any = None
        cu_seqlens_kv_padded: Any = None
        max_seqlen_q: int | None = None
        max_seqlen_kv: int | None = None
        local_cp_size: int | None = None

    batch = make_case("row joins").batch
    for name in ("megatron", "megatron.core", "megatron.core.packed_seq_params"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert type(batch.packed_seq_params()) is PackedSeqParams, "one without the class"
    sys.modules["megatron.core.packed_seq_params"].PackedSeqParams = MegatronParams
    params = batch.packed_seq_params()
    assert type(params) is MegatronParams
    assert params.cu_seqlens_q.tolist() == [0, 3, 8, 10, 14, 16]
