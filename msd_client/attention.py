"""What attention kernels are told so that a token sees its own document alone, and nothing later.

One meaning everywhere, with `documents: joined` too: a query sees the keys of its segment at its own
place and before. Padding inside a segment lies behind the segment's tokens, so they never see it;
what is left of a row is a segment of its own. (To attend over a whole row as plain GPT does, pass
`is_causal` and no mask.) `Batch` has these methods; torch is imported on first use.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from msd_client import token_places, torch_adapter
from msd_client.contract.errors import UsageError
from msd_client.token_places import Deal

FlashStyle = Literal["flash_attn", "transformers"]
MaskLayout = Literal["rows", "flat"]


@dataclass(frozen=True)
class PackedSeqParams:
    """Megatron-Core's class of this name where that is not installed: the same field names."""

    qkv_format: str
    cu_seqlens_q: Any
    cu_seqlens_kv: Any
    cu_seqlens_q_padded: Any
    cu_seqlens_kv_padded: Any
    max_seqlen_q: int
    max_seqlen_kv: int


class MaskPlaces(NamedTuple):
    """Where queries and keys lie in the whole microbatch; int32, shape (batch, queries or keys)."""

    query_places: Any
    query_segments: Any
    key_places: Any
    key_segments: Any


class PackedBatch(Protocol):
    """What the helpers read of a batch."""

    @property
    def cu_seqlens(self) -> Any:
        """Cumulative true lengths."""

    @property
    def cu_seqlens_padded(self) -> Any:
        """Boundaries in places."""

    @property
    def cp_places(self) -> Any:
        """Place in the whole microbatch of each token."""

    @property
    def max_seqlen(self) -> int:
        """Places of the longest segment."""

    @property
    def rows(self) -> int:
        """Rows."""

    @property
    def row_tokens(self) -> int:
        """Places of a whole row."""

    @property
    def deal(self) -> Deal:
        """How the microbatch was dealt."""


class AttentionHelpers:
    """The part of a batch that attention kernels are called with."""

    def flash_kwargs(self: PackedBatch, style: FlashStyle = "flash_attn") -> dict[str, Any]:
        """Return boundaries as the keyword arguments of variable-length attention kernels.

        For `causal=True` over the flattened rows. Boundaries are those in places: the padding of a
        segment lies behind its tokens, which a causal kernel never lets them see.

        Args:
            style: flash_attn names them as `flash_attn_varlen_func` does, transformers as
                `FlashAttentionKwargs` does.

        Raises:
            UsageError: The batch is a context-parallel slice; the kernels know no such thing.
        """
        if self.deal.cp_count > 1:
            raise UsageError(
                f"flash_kwargs() of a slice for cp {self.deal.cp_count}: these kernels take whole "
                "documents; use packed_seq_params() with TransformerEngine, or gather keys and "
                "values and use sdpa_mask() or flex_block_mask()",
                cp=self.deal.cp_count,
            )
        return _flash_kwargs(self.cu_seqlens_padded, self.max_seqlen, style)

    def packed_seq_params(self: PackedBatch) -> Any:
        """Return Megatron-Core's `PackedSeqParams` (or one of the same fields) for `thd` attention.

        True and padded boundaries of the whole microbatch, which TransformerEngine divides by cp
        itself; it expects every document to be dealt as `cp_layout: zigzag_document` does.

        Raises:
            UsageError: The batch is a context-parallel slice in another layout.
        """
        deal = self.deal
        if deal.cp_count > 1 and deal.layout != "zigzag_document":
            raise UsageError(
                f"packed_seq_params() of cp_layout {deal.layout}: TransformerEngine takes packed "
                "sequences dealt by document; set batch.cp_layout: zigzag_document and a "
                f"segment_multiple of {2 * deal.cp_count}",
                cp=deal.cp_count,
            )
        return _packed_seq_params(self.cu_seqlens, self.cu_seqlens_padded, self.max_seqlen)

    def sdpa_mask(self: PackedBatch, dtype: Any = bool, *, layout: MaskLayout = "rows") -> Any:
        """Return `attn_mask` of `scaled_dot_product_attention`.

        Under context parallelism queries are this rank's, keys and values those of all ranks, one
        rank after the other as an all-gather along the sequence joins them.

        Args:
            dtype: bool: True where a key is seen; a floating torch.dtype: 0 and -inf, to be added.
            layout: rows for inputs of [rows, heads, length, width]: shape (rows, 1, length,
                length * cp). flat for [1, heads, rows * length, width]: shape (1, 1, rows * length,
                rows * length * cp), `rows` times as large.

        Raises:
            UsageError: The batch holds numpy arrays, or layout or dtype is none of these.
        """
        return _dense_mask(_mask_places(self, layout), dtype)

    def flex_block_mask(
        self: PackedBatch,
        *,
        layout: MaskLayout = "rows",
        block_size: int = 128,
        is_compiled: bool = False,
    ) -> Any:
        """Return the `block_mask` of `torch.nn.attention.flex_attention`; shapes as `sdpa_mask`.

        Args:
            layout: As of `sdpa_mask`.
            block_size: Places that are skipped or computed together.
            is_compiled: True makes it with torch.compile, without a byte for each pair of query and
                key on the way: 1 GiB for a row of 32,768.

        Raises:
            UsageError: The batch holds numpy arrays, or the layout is neither.
        """
        return _flex_block_mask(_mask_places(self, layout), block_size, is_compiled=is_compiled)


def _mask_places(batch: PackedBatch, layout: MaskLayout) -> MaskPlaces:
    if layout not in ("rows", "flat"):
        raise UsageError(f"layout {layout!r} of a mask is neither rows nor flat")
    bounds, shape = batch.cu_seqlens_padded, (batch.rows, batch.row_tokens)
    is_flat = layout == "flat"
    numbers = token_places.segment_numbers(bounds, shape[0] * shape[1])
    queries = batch.cp_places.reshape(1, -1) if is_flat else batch.cp_places
    keys = token_places.gathered_places(bounds, shape, batch.deal, is_flat=is_flat)
    return MaskPlaces(queries, numbers[queries], keys, numbers[keys])


def _flash_kwargs(bounds: Any, longest: int, style: FlashStyle) -> dict[str, Any]:
    """Return boundaries as keyword arguments of variable-length attention kernels.

    Args:
        bounds: Boundaries in places.
        longest: Places of the longest segment.
        style: flash_attn or transformers.

    Raises:
        UsageError: Another style.
    """
    if style == "transformers":
        names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    elif style == "flash_attn":
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    else:
        raise UsageError(f"style {style!r} is neither flash_attn nor transformers")
    return dict(zip(names, (bounds, bounds, longest, longest), strict=True))


def _packed_seq_params(true_bounds: Any, padded_bounds: Any, longest: int) -> Any:
    """Return the parameters of packed sequences in the `thd` format.

    Args:
        true_bounds: Cumulative true lengths.
        padded_bounds: Boundaries in places.
        longest: Places of the longest segment.
    """
    return _packed_seq_params_class()(
        qkv_format="thd",
        cu_seqlens_q=true_bounds,
        cu_seqlens_kv=true_bounds,
        cu_seqlens_q_padded=padded_bounds,
        cu_seqlens_kv_padded=padded_bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _dense_mask(places: MaskPlaces, dtype: Any) -> Any:
    """Return the mask of `scaled_dot_product_attention`.

    Args:
        places: Tensors.
        dtype: bool (or torch.bool): True = seen; a floating dtype: 0 = seen, -inf = not.

    Returns:
        Shape (batch, 1, queries, keys).

    Raises:
        UsageError: The places are numpy arrays, or the dtype is neither.
    """
    _check_torch(places, "sdpa_mask")
    import torch

    is_same = places.query_segments[:, None, :, None] == places.key_segments[:, None, None, :]
    is_before = places.key_places[:, None, None, :] <= places.query_places[:, None, :, None]
    is_seen = is_same & is_before
    if dtype in (bool, torch.bool):
        return is_seen
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"dtype {dtype} of a mask is neither bool nor a floating torch.dtype")
    return torch.zeros(is_seen.shape, dtype=dtype, device=is_seen.device).masked_fill_(
        ~is_seen, float("-inf")
    )


def _flex_block_mask(places: MaskPlaces, block_size: int, *, is_compiled: bool) -> Any:
    """Return a FlexAttention `BlockMask` of shape (batch, 1, queries, keys).

    Raises:
        UsageError: The places are numpy arrays.
    """
    _check_torch(places, "flex_block_mask")
    from torch.nn.attention.flex_attention import create_block_mask

    query_places, query_segments, key_places, key_segments = places

    def is_seen(row: Any, _head: Any, query: Any, key: Any) -> Any:
        is_same = query_segments[row, query] == key_segments[row, key]
        return is_same & (key_places[row, key] <= query_places[row, query])

    return create_block_mask(
        is_seen,
        B=query_places.shape[0],
        H=None,
        Q_LEN=query_places.shape[1],
        KV_LEN=key_places.shape[1],
        device=query_places.device,
        BLOCK_SIZE=block_size,
        _compile=is_compiled,
    )


def _packed_seq_params_class() -> Any:
    if "megatron.core" not in sys.modules and not _has_megatron():
        return PackedSeqParams
    try:
        return importlib.import_module("megatron.core.packed_seq_params").PackedSeqParams
    except (ImportError, AttributeError):  # too old, or its own needs are not met here
        return PackedSeqParams


def _has_megatron() -> bool:
    try:
        return importlib.util.find_spec("megatron.core") is not None
    except (ImportError, ValueError):  # no `megatron` at all, or a half-made one
        return False


def _check_torch(places: MaskPlaces, name: str) -> None:
    if not torch_adapter.is_tensor(places.query_places):
        raise UsageError(f"{name}() of numpy arrays: open the loader with torch")
