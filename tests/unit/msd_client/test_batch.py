"""Batches: views that are right, read-only and hold their slot; copies that do not."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from copy import copy as shallow_copy
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from msd_client import torch_adapter
from msd_client.batch import Batch
from msd_client.contract.batch_spec import BatchSpec
from msd_client.contract.errors import BatchReleasedError, UsageError
from tests.support.rings import SmallRing, sample_arrays, small_ring

KINDS = [
    "numpy",
    pytest.param(
        "torch",
        marks=pytest.mark.skipif(not torch_adapter.has_torch(), reason="torch is not installed"),
    ),
]
needs_torch = pytest.mark.skipif(not torch_adapter.has_torch(), reason="torch is not installed")


@pytest.fixture
def ring() -> Iterator[SmallRing]:
    with small_ring() as made:
        yield made


def plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copy", [False, True])
def test_a_batch_holds_what_the_slot_holds(ring: SmallRing, kind: str, copy: bool) -> None:
    batch = ring.batch(sequence=50, as_=kind, copy=copy)
    for name, array in sample_arrays(50).items():
        assert plain(batch[name]) == array.tolist()
        assert str(batch[name].dtype).removeprefix("torch.") == str(array.dtype)
        assert plain(getattr(batch, name)) == array.tolist()
    assert (batch.step, batch.plan_step, batch.microbatch, batch.rows) == (7, 8, 1, 2)
    assert (batch.max_seqlen, batch.valid_tokens) == (3, 5)
    assert type(batch.max_seqlen) is int
    assert "tokens=(2, 4)" in repr(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_flat_fields_lie_over_the_same_bytes(ring: SmallRing, kind: str) -> None:
    batch = ring.batch(as_=kind)
    for name in ("tokens", "labels", "position_ids", "segment_ids"):
        flat = getattr(batch.flat, name)
        assert tuple(flat.shape) == (1, 8)
        assert np.shares_memory(np.asarray(flat), np.asarray(batch[name]))
    for name in ("cu_seqlens", "rows", "nothing"):
        with pytest.raises(AttributeError, match=name):
            getattr(batch.flat, name)


@pytest.mark.parametrize("kind", KINDS)
def test_segment_ids_number_the_segments_padding_included(ring: SmallRing, kind: str) -> None:
    batch = ring.batch(as_=kind)
    assert plain(batch.segment_ids) == [[0, 0, 0, 1], [2, 2, 3, 3]]
    assert batch["segment_ids"] is batch.segment_ids
    assert str(batch.segment_ids.dtype).removeprefix("torch.") == "int32"


@pytest.mark.parametrize("kind", KINDS)
def test_kernel_arguments_are_the_boundaries(ring: SmallRing, kind: str) -> None:
    batch = ring.batch(as_=kind)
    flash = batch.flash_kwargs()
    assert set(flash) == {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}
    assert flash["cu_seqlens_q"] is flash["cu_seqlens_k"] is batch.cu_seqlens
    assert flash["max_seqlen_k"] == 3
    named = batch.flash_kwargs("transformers")
    assert set(named) == {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


def test_a_batch_is_a_mutable_dict(ring: SmallRing) -> None:
    batch = ring.batch(as_="numpy")
    batch["advantage"] = 3
    assert batch.advantage == 3
    mine = batch["labels"] = batch.labels + 1
    assert batch.labels is mine
    del batch["advantage"]
    with pytest.raises(AttributeError, match="no field 'advantage'"):
        _ = batch.advantage
    with pytest.raises(KeyError):
        _ = batch["advantage"]


def test_numpy_views_refuse_writes(ring: SmallRing) -> None:
    batch = ring.batch(as_="numpy")
    with pytest.raises(ValueError, match="read-only"):
        batch.tokens[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        batch.tokens.flags.writeable = True


@needs_torch
def test_numpy_views_of_torch_views_refuse_writes_and_hold_the_slot(ring: SmallRing) -> None:
    arrays = ring.batch(as_="torch").numpy()
    assert arrays.is_leased
    assert arrays.tokens.tolist() == sample_arrays(1)["tokens"].tolist()
    with pytest.raises(ValueError, match="read-only"):
        arrays.tokens[0, 0] = 1
    gc.collect()
    assert ring.released == []
    del arrays
    assert ring.released == [(0, 1)]


@needs_torch
def test_an_in_place_write_to_a_torch_view_is_fatal_and_spares_the_slot(ring: SmallRing) -> None:
    payload_bytes = ring.fill(0, 1, **sample_arrays())
    code = f"""
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from msd_client.batch import Batch
    from msd_client.contract.ring_layout import RingLayout
    from msd_client.ring_reader import RingReader
    layout = RingLayout.decode({ring.layout.encode()})
    batch = Batch.from_lease(RingReader(0, layout).open(0, 1, layout.generation, {payload_bytes}))
    print(int(batch.tokens.sum()), flush=True)
    batch.tokens.add_(1)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        stdin=ring.segment.fd_read_only,
        env=os.environ | {"PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.stdout == "28\n", done.stderr
    assert done.returncode == -signal.SIGSEGV
    assert ring.batch(as_="numpy").tokens.sum() == sample_arrays(1)["tokens"].sum()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_returns_its_slot_when_it_and_its_views_are_gone(
    ring: SmallRing, kind: str
) -> None:
    batch = ring.batch(as_=kind)
    row = batch.tokens[0]
    del batch
    gc.collect()
    assert ring.released == []
    del row
    gc.collect()
    assert ring.released == [(0, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_release_marks_and_never_overrules_a_view(ring: SmallRing, kind: str) -> None:
    batch = ring.batch(sequence=30, as_=kind)
    row = batch.tokens[0]
    batch.release()
    batch.release()
    assert ring.released == []
    assert plain(row) == [30, 31, 32, 33]
    del row
    assert ring.released == [(0, 30)]


def test_a_released_batch_says_so(ring: SmallRing) -> None:
    with ring.batch(as_="numpy") as batch:
        assert batch.is_leased
    assert not batch.is_leased
    assert ring.released == [(0, 1)]
    assert repr(batch) == "Batch(released)"
    for use in (
        lambda: batch.tokens,
        lambda: batch["labels"],
        batch.clone,
        batch.numpy,
        lambda: batch.to("cpu"),
        lambda: batch.segment_ids,
    ):
        with pytest.raises(BatchReleasedError):
            use()


@pytest.mark.parametrize("kind", KINDS)
def test_clones_are_writable_and_hold_nothing(ring: SmallRing, kind: str) -> None:
    batch = ring.batch(as_=kind)
    private = batch.clone()
    del batch
    gc.collect()
    assert ring.released == [(0, 1)]
    private.tokens[0, 0] = 99
    assert int(private.tokens[0, 0]) == 99
    assert not private.is_leased
    assert private.clone().step == 7


@pytest.mark.parametrize("take", [pickle.dumps, deepcopy])
def test_views_are_not_pickled_and_clones_are(ring: SmallRing, take: Any) -> None:
    batch = ring.batch(as_="numpy")
    for views in (batch, batch.numpy()):
        with pytest.raises(UsageError, match=r"clone\(\) it first"):
            take(views)
    taken = take(batch.clone())
    again = pickle.loads(taken) if isinstance(taken, bytes) else taken
    assert again.tokens.tolist() == batch.tokens.tolist()
    assert (again.step, again.spec) == (7, batch.spec)
    batch.release()
    with pytest.raises(BatchReleasedError):
        take(batch)


def test_a_shallow_copy_is_of_the_same_views(ring: SmallRing) -> None:
    batch = ring.batch(as_="numpy")
    other = shallow_copy(batch)
    assert other.tokens is batch.tokens
    assert other.is_leased
    del batch, other
    gc.collect()
    assert ring.released == [(0, 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_copying_mode_returns_the_slot_at_once(ring: SmallRing, kind: str) -> None:
    batch = ring.batch(as_=kind, copy=True)
    assert ring.released == [(0, 1)]
    ring.fill(0, 2, **sample_arrays(500))
    batch.labels[0, 0] = -5
    assert plain(batch.tokens) == sample_arrays(1)["tokens"].tolist()


def test_conventions_come_from_the_spec(ring: SmallRing) -> None:
    spec = BatchSpec.for_rule(rows=2, row_tokens=4, row_segments_max=4, labels="aligned", pad_id=9)
    batch = ring.batch(spec=spec, as_="numpy")
    assert batch.conventions == {
        "labels": "aligned",
        "documents": "separate",
        "ignore": "label",
        "ignore_label": -100,
        "pad_id": 9,
        "segment_multiple": 1,
        "boundaries": "exact",
        "cp_layout": "zigzag_row",
        "stage": "all",
    }
    assert batch.clone().conventions == batch.conventions
    assert ring.batch(slot=1, sequence=2, as_="numpy").conventions == {}
    masked = BatchSpec.for_rule(
        rows=2, row_tokens=4, row_segments_max=4, ignore="loss_mask", pad_id=9, source_weights=(1,)
    )
    batch = ring.batch(slot=2, sequence=3, spec=masked, as_="numpy")
    assert (batch.conventions["ignore"], batch.conventions["ignore_label"]) == ("loss_mask", 9)


# ---- devices ----


class FakeEvent:
    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


@needs_torch
def test_moving_to_the_same_device_moves_nothing(ring: SmallRing) -> None:
    batch = ring.batch(as_="torch")
    assert batch.to("cpu") is batch


@needs_torch
def test_numpy_batches_have_no_device(ring: SmallRing) -> None:
    with pytest.raises(UsageError, match="torch"):
        ring.batch(as_="numpy").to("cpu")


@needs_torch
@pytest.mark.parametrize("is_released_first", [False, True])
def test_a_copy_in_flight_keeps_the_slot_until_its_event(
    ring: SmallRing, monkeypatch: pytest.MonkeyPatch, is_released_first: bool
) -> None:
    event = FakeEvent()
    monkeypatch.setattr(torch_adapter, "record_event", lambda device: event)
    batch = ring.batch(as_="torch")
    twin = Batch(batch, batch._lease) if is_released_first else batch
    if is_released_first:
        batch.release()
    moved = twin.to("meta", non_blocking=True)
    assert moved.tokens.device.type == "meta"
    assert not moved.is_leased
    assert moved.step == 7
    del batch, twin
    gc.collect()
    assert ring.reader.poll() == 1
    assert ring.released == []
    event.is_done = True
    ring.reader.poll()
    assert ring.released == [(0, 1)]


@needs_torch
def test_a_blocking_copy_needs_no_event(ring: SmallRing) -> None:
    batch = ring.batch(as_="torch")
    moved = batch.to("meta")
    assert ring.reader.pending_count == 0
    del batch
    gc.collect()
    assert ring.released == [(0, 1)]
    assert moved.labels.shape == (2, 4)


@needs_torch
def test_devices_that_run_nothing_behind_need_no_event() -> None:
    import torch

    assert torch_adapter.record_event(torch.device("meta")) is None
    assert torch_adapter.record_event(torch.device("cpu")) is None


@needs_torch
def test_a_batch_moves_to_a_gpu_and_back(ring: SmallRing) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    batch = ring.batch(as_="torch")
    moved = batch.to("cuda", non_blocking=True)
    del batch
    torch.cuda.synchronize()
    ring.reader.poll()
    assert ring.released == [(0, 1)]
    assert moved.numpy().tokens.tolist() == sample_arrays(1)["tokens"].tolist()
    assert moved.segment_ids.cpu().tolist() == [[0, 0, 0, 1], [2, 2, 3, 3]]


# ---- imports ----


def test_numpy_batches_never_import_torch() -> None:
    code = """
    import sys
    import numpy as np
    from tests.support.rings import small_ring
    with small_ring() as ring:
        batch = ring.batch(as_="numpy")
        batch.segment_ids, batch.clone(), batch.numpy()
    assert "torch" not in sys.modules
    print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": ":".join([os.getcwd(), *(p for p in sys.path if p)])},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "fine\n", done.stderr


def test_reading_needs_nothing_of_the_daemon() -> None:
    code = """
    import sys
    import msd_client.batch, msd_client.ring_reader
    print(sorted({m.split(".")[0] for m in sys.modules} & {"msd_daemon", "federation", "torch"}))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": ":".join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout == "[]\n"
