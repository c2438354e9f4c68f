"""Images, videos or sounds of a batch, and where their embeddings go: numpy and torch alike.

Where media may be encoded anywhere (`batch.encode: any`), those of a batch are the ones that the plan
gives to its group; `route` says where their embeddings go and which ones come
(`msd_client.embedding_exchange` sends them).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from msd_client import token_places, torch_adapter
from msd_client.attention import PackedBatch
from msd_client.contract.errors import UsageError
from msd_client.contract.media_fields import (
    MODALITY_OF,
    Modality,
    field_names,
    longest_name,
    units_name,
)


class Media(NamedTuple):
    """One modality of a microbatch; every context-parallel rank sees all of it.

    Items lie in the order of the tokens: by row, then by place in the row. Arrays are of the
    batch's kind and on its device; all are empty (boundaries are [0]) where it holds no item.
    Where media may be encoded anywhere, `patches`, `grids`, `cu_seqlens`, `max_seqlen` and
    `cu_embeddings` are of the items to encode here, in the order of `Route`; `places`, `cu_places`
    and `segments` are of the items of the text here.
    """

    patches: Any
    """Patches of all items (of sounds: frames). Shape (units, values)."""
    grids: Any
    """Patches in time, height and width. Shape (items, 3), int32; None for sounds."""
    cu_seqlens: Any
    """Boundaries of the items in units. Shape (items + 1,), int32."""
    places: Any
    """Place of each placeholder token in the flattened rows of the whole microbatch, int32."""
    cu_places: Any
    """Boundaries of the items in placeholder tokens. Shape (items + 1,), int32."""
    segments: Any
    """Number of the segment that each item lies in. Shape (items,), int32."""
    max_seqlen: int
    """Units of the largest item, 0 where there is none."""
    cu_embeddings: Any
    """Boundaries of the items that `patches` are of in embeddings, one a placeholder token: the
    same as `cu_places` where media are encoded with their text. Shape (items + 1,), int32."""

    @property
    def frames(self) -> Any:
        """Frames of all sounds: `patches` by their own name. Shape (frames, values)."""
        return self.patches


class Route(NamedTuple):
    """The way of a modality's embeddings in a microbatch, one embedding a placeholder token.

    Items to encode here are sorted by (data-parallel group, place) of their text, so embeddings
    item by item are the send buffer of an all-to-all among the groups.
    """

    send_counts: list[int]
    """Embeddings for each data-parallel group, this one included. dp entries."""
    recv_counts: list[int]
    """Embeddings from each group. dp entries."""
    recv_places: Any
    """Place of each embedding that arrives, in the flattened rows of the whole microbatch, in the
    order of arrival. Shape (sum of recv_counts,), int32."""


class PackedMedia(PackedBatch, Protocol):
    """What the helpers read of a batch."""

    def __getitem__(self, name: str, /) -> Any:
        """Return a field."""

    def media(self, modality: Modality) -> Media:
        """Return the images, videos or sounds of this microbatch."""

    def __contains__(self, name: object, /) -> bool:
        """Return True where there is such a field."""


class MediaHelpers:
    """The part of a batch that encoders are called with."""

    def media(self: PackedMedia, modality: Modality) -> Media:
        """Return the images, videos or sounds of this microbatch.

        Args:
            modality: image, video or audio.

        Raises:
            UsageError: The job has no such media, or another pipeline stage reads them.
            BatchReleasedError: The batch was released.
        """
        try:
            return _media_of(self, modality)
        except KeyError as error:
            raise UsageError(error.args[0], modality=modality) from None

    def route(self: PackedMedia, modality: Modality) -> Route:
        """Return where the embeddings of this microbatch's media go, and which ones come.

        Args:
            modality: image, video or audio.

        Raises:
            UsageError: The job has no such media, they are encoded where their text is, or another
                pipeline stage reads them.
            BatchReleasedError: The batch was released.
        """
        self.media(modality)
        if not is_routed(self, modality):
            raise UsageError(
                f"{modality} of this job is encoded where its text is, so no embedding is routed: "
                "write strategy: vlm_hybrid, or batch.encode: any",
                modality=modality,
            )
        return Route(
            self[f"{modality}_send_counts"].tolist(),
            self[f"{modality}_recv_counts"].tolist(),
            self[f"{modality}_recv_places"],
        )

    def local_places(self: PackedMedia, modality: Modality) -> tuple[Any, Any]:
        """Return where this rank's tokens take the embeddings of a modality.

        Placeholder tokens are numbered in the order of items and their tokens, as an encoder gives
        embeddings: `inputs.view(-1, width)[places] = embeddings[numbers]`. Where media may be
        encoded anywhere, they are numbered as they arrive (`Route.recv_places`).

        Args:
            modality: image, video or audio.

        Returns:
            Places in this rank's flattened tokens [1, rows * length], and the numbers of the
            placeholder tokens there; int32, shape (m,). All of them without context parallelism; of
            a slice those alone that the rank holds, which on a device waits for their count.

        Raises:
            UsageError: See `media`.
        """
        places = self.media(modality).places
        if is_routed(self, modality):
            places = self[f"{modality}_recv_places"]
        if self.deal.cp_count == 1:
            return places, token_places.array_ops(places).arange(len(places))
        return _local_of(places, self.cp_places, self.rows * self.row_tokens)


def is_routed(batch: PackedMedia, modality: str) -> bool:
    """Return True where a batch's media may be encoded by another group than their text's."""
    return f"{modality}_send_counts" in batch


def modality_of(name: str) -> str | None:
    """Return the modality that a field name is of, None where it is none of media's."""
    return MODALITY_OF.get(name)


def _media_of(fields: PackedMedia, modality: str) -> Media:
    """Return one modality of a batch.

    Args:
        fields: The batch, by field name.
        modality: image, video or audio.

    Raises:
        KeyError: The batch has no such fields.
    """
    has_grids = f"{modality}_grids" in field_names(modality)
    return Media(
        fields[units_name(modality)],
        fields[f"{modality}_grids"] if has_grids else None,
        fields[f"{modality}_cu_seqlens"],
        fields[f"{modality}_places"],
        fields[f"{modality}_cu_places"],
        fields[f"{modality}_segments"],
        int(fields[longest_name(modality)]),
        fields[f"{modality}_cu_sends" if is_routed(fields, modality) else f"{modality}_cu_places"],
    )


def _local_of(places: Any, cp_places: Any, places_count: int) -> tuple[Any, Any]:
    """Return which of some places a context-parallel rank holds.

    Args:
        places: Flat places in the whole microbatch. Shape (n,), int32.
        cp_places: Flat place of each of the rank's tokens. Shape (rows, length), int32.
        places_count: rows * row_tokens of the whole microbatch.

    Returns:
        Where they lie in the rank's flattened tokens, and which of `places` those are; both int32,
        shape (m,). Their number depends on the data: on a device this waits for it.
    """
    own = cp_places.reshape(-1)
    if not torch_adapter.is_tensor(places):
        local = np.full(places_count, -1, np.int32)
        local[own] = np.arange(len(own), dtype=np.int32)
        found = local[places]
        numbers = np.flatnonzero(found >= 0)
        return found[numbers], numbers.astype(np.int32)
    return torch_adapter.local_of(places, own, places_count)
