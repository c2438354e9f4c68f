"""Routes of embeddings for a trainer: what a batch says, what the exchange refuses, gradients back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from federation.model.place_tree import DP_AXES as TREE_DP_AXES
from federation.model.place_tree import ClientPlaceTree
from msd_client.batch import Batch
from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.errors import BatchReleasedError, ConfigError, UsageError
from msd_client.mesh import DP_AXES, dp_peers
from msd_daemon.gather.encode_columns import EncodeColumns
from msd_daemon.inline_media import InlineItem
from tests.support.media_rows import FIELDS, Cut, Sample, build, segments_of

PATCHES = np.arange(64, dtype=np.uint8).reshape(16, 4)
PICTURE = Sample(
    [1, 900, 900, 900, 900, 2], {1, 2, 3, 4}, [(0, InlineItem(1, 4, (1, 4, 4), PATCHES))]
)
SMALL = Sample([5, 900, 6], {1}, [(0, InlineItem(1, 1, (1, 2, 2), PATCHES[:4] + 100))])
CHUNKS = [[PICTURE], [SMALL]]
OWN = [Cut(0, 0, 0, 6, 0, 0), Cut(1, 0, 0, 3, 0, 6)]


def spec(**change: Any) -> BatchSpec:
    rule: dict[str, Any] = {
        "rows": 1, "row_tokens": 12, "row_segments_max": 4, "media": FIELDS, "encode_dp_count": 2,
    }  # fmt: skip
    return BatchSpec.for_rule(**(rule | change))


def encoding(encode_dp: list[int], here: list[Cut], **change: Any) -> EncodeColumns:
    """Return a task's: `here` are cuts of all groups, rows counted on."""
    none = segments_of(CHUNKS, [])
    columns = np.full((3, 2), -1, np.int32)
    columns[0] = encode_dp
    return EncodeColumns(columns, (segments_of(CHUNKS, here), none, none))


def routed(kind: Any = "numpy") -> Batch:
    """Return the batch of group 0: its big picture is encoded by group 1, a small one of 1 here."""
    far = Cut(1, 0, 0, 3, 1, 4)
    (batch,) = build(
        spec(), CHUNKS, OWN, as_=kind, encoding=encoding([1, 0], [Cut(1, 0, 0, 3, 0, 6), far])
    )
    return batch


def test_a_batch_says_what_to_encode_what_to_send_and_what_comes() -> None:
    batch = routed()
    media, route = batch.media("image"), batch.route("image")
    assert media.patches.tolist() == [*(PATCHES[:4] + 100).tolist()] * 2
    assert media.cu_seqlens.tolist() == [0, 4, 8]
    assert media.cu_embeddings.tolist() == [0, 1, 2]
    assert (route.send_counts, route.recv_counts) == ([1, 1], [1, 4])
    assert route.recv_places.tolist() == [7, 1, 2, 3, 4]
    places, numbers = batch.local_places("image")
    assert (places.tolist(), numbers.tolist()) == ([7, 1, 2, 3, 4], [0, 1, 2, 3, 4])
    assert media.places.tolist() == [1, 2, 3, 4, 7]
    assert media.cu_places.tolist() == [0, 4, 5]
    assert media.segments.tolist() == [0, 1]
    empty = batch.route("audio")
    assert (empty.send_counts, empty.recv_counts) == ([0, 0], [0, 0])
    assert batch.media("audio").cu_embeddings.tolist() == [0]


def test_a_batch_without_routes_says_how_to_have_them() -> None:
    (batch,) = build(spec(encode_dp_count=0), CHUNKS, OWN)
    assert batch.media("image").cu_embeddings.tolist() == [0, 4, 5]
    with pytest.raises(UsageError, match="vlm_hybrid"):
        batch.route("image")
    with pytest.raises(UsageError, match="first stage"):
        build(spec(stage="last"), CHUNKS, OWN)[0].route("image")
    batch.release()
    with pytest.raises(BatchReleasedError):
        batch.route("image")


@pytest.mark.parametrize(
    ("groups", "here", "line"),
    [
        ([1, 2], [], "groups 1 to 2 of 2"),
        ([-1, 0], [], "groups -1 to 0 of 2"),
        ([0, 0], [Cut(0, 0, 0, 6, 2, 0)], "outside the microbatch"),
        ([0, 0], [Cut(0, 0, 0, 6, 0, n * 6) for n in range(2)] * 3, "overlaps"),
    ],
)
def test_a_task_that_does_not_add_up_is_refused(
    groups: list[int], here: list[Cut], line: str
) -> None:
    with pytest.raises(ValueError, match=line):
        build(spec(), CHUNKS, OWN, encoding=encoding(groups, here))


def test_more_to_encode_than_a_slot_holds_is_refused() -> None:
    many = [Cut(0, 0, 0, 6, group, column) for group in range(2) for column in (0, 6)]
    with pytest.raises(ValueError, match="64 units and 4 items where the slot has room for 60"):
        small = tuple(
            type(field)(field.modality, field.unit_values, field.unit_dtype, 60, field.merge)
            for field in FIELDS
        )
        build(spec(media=small), CHUNKS, OWN, encoding=encoding([1, 1], many))


def test_task_and_slot_have_routes_both_or_neither() -> None:
    with pytest.raises(ValueError, match="for a slot of routes to 2 groups"):
        build(spec(), CHUNKS, OWN)
    with pytest.raises(ValueError, match="for a slot of routes to 0 groups"):
        build(spec(encode_dp_count=0), CHUNKS, OWN, encoding=encoding([0, 0], OWN))
    with pytest.raises(ConfigError, match="encode_dp_count"):
        spec(encode_dp_count=-1)


def test_a_cut_task_is_refused() -> None:
    whole = encoding([1, 0], OWN).encode()
    for size in range(len(whole)):
        with pytest.raises(ValueError, match="bytes"):
            EncodeColumns.decode(whole[:size], 2, 3, 0)
    again = EncodeColumns.decode(whole, 2, 3, 0)
    assert again.encode() == whole


AXES = st.lists(
    st.sampled_from(["pp", "dp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]),
    unique=True,
    max_size=5,
).flatmap(lambda names: st.fixed_dictionaries({name: st.integers(1, 3) for name in names}))


@given(mesh=AXES)
def test_peers_are_the_ranks_that_differ_by_their_dp_group_alone(mesh: dict[str, int]) -> None:
    assert set(DP_AXES) == set(TREE_DP_AXES)
    tree = ClientPlaceTree.from_mesh(mesh)
    groups = dp_peers(mesh)
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(tree.rank_count))
    for ranks in groups:
        assert [tree.dp_group(rank) for rank in ranks] == list(range(tree.dp_count))
        others = {
            tuple(place for axis, place in tree.coordinate(rank).items() if axis not in DP_AXES)
            for rank in ranks
        }
        assert len(others) == 1


# ---- torch ----


@pytest.fixture(scope="module")
def alone() -> Any:
    """A process group of one rank."""
    torch = pytest.importorskip("torch")
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield torch
    dist.destroy_process_group()


def batch_of_one() -> Batch:
    both = encoding([0, 0], OWN)
    (batch,) = build(spec(encode_dp_count=1), CHUNKS, OWN, as_="torch", encoding=both)
    return batch


def test_embeddings_are_placed_and_gradients_come_back(alone: Any) -> None:
    from msd_client.embedding_exchange import place_embeddings

    batch = batch_of_one()
    inputs = alone.zeros((1, 12, 2), dtype=alone.float64)
    vectors = (1.0 + alone.arange(10, dtype=alone.float64).view(5, 2)).requires_grad_()
    placed = place_embeddings(inputs, batch, "image", vectors)
    assert placed[0, :, 0].tolist() == [0, 1, 3, 5, 7, 0, 0, 9, 0, 0, 0, 0]
    assert not inputs.any()
    weights = alone.arange(24, dtype=alone.float64).view(1, 12, 2)
    (placed * weights).sum().backward()
    assert vectors.grad[:, 0].tolist() == [2, 4, 6, 8, 14]
    # Nothing to encode and nothing trained here: this rank takes part in the backward all the same.
    nothing = place_embeddings(inputs, batch, "audio", alone.zeros((0, 2), dtype=alone.float64))
    assert nothing.requires_grad
    frozen = place_embeddings(inputs, batch, "image", vectors.detach(), is_trained=False)
    assert not frozen.requires_grad
    with alone.no_grad():
        assert not place_embeddings(inputs, batch, "image", vectors.detach()).requires_grad


def test_where_media_are_encoded_at_home_nothing_is_sent(alone: Any) -> None:
    from msd_client.embedding_exchange import exchange_embeddings

    (batch,) = build(spec(encode_dp_count=0), CHUNKS, OWN, as_="torch")
    vectors = alone.ones((5, 2))
    assert exchange_embeddings(batch, "image", vectors) is vectors
    with pytest.raises(UsageError, match="none of its sources"):
        exchange_embeddings(
            build(spec(encode_dp_count=0, media=()), [[Sample([1])]], [], as_="torch")[0],
            "image",
            vectors,
        )


def test_another_number_of_embeddings_or_ranks_is_refused(alone: Any) -> None:
    from msd_client.embedding_exchange import exchange_embeddings

    with pytest.raises(UsageError, match=r"4 embeddings of image, .* 5 placeholder tokens"):
        exchange_embeddings(batch_of_one(), "image", alone.ones((4, 2)))
    with pytest.raises(UsageError, match=r"group of 1 ranks .* among 2 .*dp_peers"):
        exchange_embeddings(routed("torch"), "image", alone.ones((2, 2)))


def test_counts_stay_on_the_host(alone: Any) -> None:
    batch = routed("torch")
    moved = batch.to("meta")
    assert moved.route("image").send_counts == [1, 1]
    assert moved.route("image").recv_places.device.type == "meta"
    assert moved.to("meta") is moved
    assert batch.numpy().route("image").recv_counts == [1, 4]
    assert batch.clone().route("image").recv_counts == [1, 4]
