"""CURVE on the control wire: who is let in, keys that come, go and change while all runs."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import pytest

from federation.addresses import Endpoint, has_ipv6
from federation.key_files import PUBLIC, generate, revoke, rotate, utc_now
from tests.support.cluster_ends import LinkLog, RouterThread, on_uvloop, running_link
from tests.support.cluster_keys import KeyCase

needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="IPv6 is off on this machine")


@pytest.fixture
def case(tmp_path: Path) -> KeyCase:
    return KeyCase(tmp_path, "p0", "n1", "n2")


@pytest.fixture
def planner(case: KeyCase) -> Iterator[RouterThread]:
    one = RouterThread("tcp://127.0.0.1:0", case.keys("p0"), answer=True)
    yield one
    one.close()


def at(planner: RouterThread, name: str = "p0") -> str:
    return f"{name}@{planner.endpoint}"


async def echoes(log: LinkLog, planner: RouterThread, number: int, node: str = "n1") -> None:
    log.say(number)
    await log.until(lambda: number in planner.heard(node) and number in log.numbers, f"{number}")


@on_uvloop
async def test_listed_nodes_come_in_under_their_keys_names(
    case: KeyCase, planner: RouterThread
) -> None:
    async with (
        running_link(at(planner), node="n1", keys=case.keys("n1")) as one,
        running_link(at(planner), node="n2", keys=case.keys("n2")) as two,
    ):
        await one.until(lambda: one.ups and two.ups)
        await echoes(one, planner, 1)
        await echoes(two, planner, 2, "n2")
        assert planner.heard("n1") == [1]


@pytest.mark.parametrize(
    ("listen", "host"),
    [
        ("*:0", "127.0.0.1"),
        ("*:0", "localhost"),
        ("0.0.0.0:0", "localhost"),
        ("%lo:0", "127.0.0.1"),
        ("localhost:0", "localhost"),
        pytest.param("*:0", "[::1]", marks=needs_ipv6),
        pytest.param("[::1]:0", "[::1]", marks=needs_ipv6),
        pytest.param("::1", "[::1]", marks=needs_ipv6),
    ],
)
@on_uvloop
async def test_addresses_are_listened_on_with_keys(case: KeyCase, listen: str, host: str) -> None:
    planner = RouterThread(listen, case.keys("p0"), answer=True)
    try:
        place = f"p0@{host}:{planner.port}"
        async with running_link(place, node="n1", keys=case.keys("n1")) as log:
            await log.until(lambda: log.ups)
            await echoes(log, planner, 1)
    finally:
        planner.close()


@on_uvloop
async def test_name_whose_first_address_nobody_listens_on_is_tried_at_the_others(
    case: KeyCase, planner: RouterThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = planner.port
    places = [Endpoint("127.0.0.77", port), Endpoint("127.0.0.1", port)]
    monkeypatch.setattr("federation.dialer.resolve", lambda *_: places)
    async with running_link(f"p0@planner.test:{port}", node="n1", keys=case.keys("n1")) as log:
        await log.until(lambda: log.ups)
        await echoes(log, planner, 1)


@on_uvloop
async def test_name_that_is_unknown_at_first_is_found_later(
    case: KeyCase, planner: RouterThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = f"p0@nowhere.invalid:{planner.port}"
    async with running_link(place, node="n1", keys=case.keys("n1")) as log:
        await log.until(lambda: "nowhere.invalid" in log.link.planners[0].refusal)
        known = [Endpoint("127.0.0.1", planner.port)]
        monkeypatch.setattr("federation.dialer.resolve", lambda *_: known)
        await log.until(lambda: log.ups)


@on_uvloop
async def test_unlisted_key_gets_nothing_until_it_is_listed(
    case: KeyCase, planner: RouterThread
) -> None:
    case.add("n3")
    (case.folder("n3") / "p0.pub").write_bytes((case.folder("p0") / "p0.pub").read_bytes())
    async with running_link(at(planner), node="n3", keys=case.keys("n3")) as log:
        await log.until(lambda: log.link.planners[0].refusal, "refusal")
        assert "does not list the key" in log.link.planners[0].refusal
        assert not planner.events
        case.share("p0", "n3")
        await log.until(lambda: log.ups, "up")
        await echoes(log, planner, 1, "n3")


@on_uvloop
async def test_key_of_another_node_does_not_speak_for_a_node(
    case: KeyCase, planner: RouterThread
) -> None:
    async with running_link(at(planner), node="n1", keys=case.keys("n2")) as log:
        await log.until(lambda: log.link.planners[0].refusal)
        assert "n2 greets as n1" in log.link.planners[0].refusal
        assert not log.ups
    assert not planner.events


@on_uvloop
async def test_planner_with_another_key_than_the_listed_one_is_not_spoken_to(
    case: KeyCase, planner: RouterThread
) -> None:
    stranger = case.add("x")
    listed = case.folder("n1") / "p0.pub"
    right = listed.read_bytes()
    listed.write_bytes((stranger / "x.pub").read_bytes())
    async with running_link(at(planner), node="n1", keys=case.keys("n1")) as log:
        await log.until(lambda: log.link.planners[0].refusal)
        assert "another key than the one that is listed" in log.link.planners[0].refusal
        assert not log.ups
        listed.write_bytes(right)
        await log.until(lambda: log.ups)


@on_uvloop
async def test_planner_without_a_listed_key_is_named_and_not_called(
    case: KeyCase, planner: RouterThread
) -> None:
    (case.folder("n1") / "p0.pub").unlink()
    async with running_link(at(planner), node="n1", keys=case.keys("n1")) as log:
        await log.until(lambda: "no key of p0" in log.link.planners[0].refusal)
        case.share("p0", "n1")
        await log.until(lambda: log.ups)


@on_uvloop
async def test_revoked_node_is_cut_off_and_the_others_stay(
    case: KeyCase, planner: RouterThread
) -> None:
    async with (
        running_link(at(planner), node="n1", keys=case.keys("n1")) as one,
        running_link(at(planner), node="n2", keys=case.keys("n2")) as two,
    ):
        await one.until(lambda: one.ups and two.ups)
        await echoes(one, planner, 1)
        revoke(case.folder("p0"), "n1")
        await one.until(lambda: planner.downs("n1"))
        assert "no longer listed" in planner.downs("n1")[0]
        one.say(2)
        await one.until(lambda: "does not list" in one.link.planners[0].refusal)
        await echoes(two, planner, 3, "n2")
        assert planner.heard("n1") == [1]
        # Listing it again does not help: the key was revoked, not forgotten.
        case.share("p0", "n1")
        refused = planner.router._connections.authenticator.counts["refused"]  # type: ignore[union-attr]
        await one.until(
            lambda: planner.router._connections.authenticator.counts["refused"] > refused + 1  # type: ignore[union-attr]
        )
        assert planner.ups("n1") == 1


@on_uvloop
async def test_key_of_a_node_is_replaced_while_it_runs(
    case: KeyCase, planner: RouterThread
) -> None:
    async with running_link(at(planner), node="n1", keys=case.keys("n1")) as log:
        await log.until(lambda: log.ups)
        # The planner knows the old key alone until the public file is copied: the grace covers it.
        rotate(case.folder("n1"), "n1", dt.timedelta(hours=1), utc_now())
        await echoes(log, planner, 1)
    async with running_link(at(planner), node="n1", keys=case.keys("n1")) as log:
        await log.until(lambda: log.ups, "up with the old key")
        case.share("n1", "p0")
        await echoes(log, planner, 2)
    async with running_link(at(planner), node="n1", keys=case.keys("n1")) as log:
        await log.until(lambda: log.ups, "up with the new key")
        await echoes(log, planner, 3)


@on_uvloop
async def test_old_key_is_cut_off_when_its_grace_ends(case: KeyCase, planner: RouterThread) -> None:
    async with running_link(at(planner), node="n1", keys=case.keys("n1")) as log:
        await log.until(lambda: log.ups)
        rotate(case.folder("n1"), "n1", dt.timedelta(seconds=2), utc_now())
        case.share("n1", "p0")
        await log.until(lambda: planner.downs("n1"), "old key cut off")
        await log.until(lambda: planner.ups("n1") == 2, "back with the new key")
        await echoes(log, planner, 1)


@on_uvloop
async def test_key_of_the_planner_is_replaced_while_it_runs(
    case: KeyCase, planner: RouterThread
) -> None:
    async with running_link(at(planner), node="n1", keys=case.keys("n1")) as one:
        await one.until(lambda: one.ups)
        rotate(case.folder("p0"), "p0", dt.timedelta(seconds=2), utc_now())
        case.share("p0", "n2")
        # n2 knows both keys, in the grace and after it; n1's connection lasts.
        async with running_link(at(planner), node="n2", keys=case.keys("n2")) as two:
            await two.until(lambda: two.ups)
            await echoes(two, planner, 1, "n2")
        await one.until(lambda: planner.router._connections._own == case.keys("p0").own_pairs[0])
        async with running_link(at(planner), node="n2", keys=case.keys("n2")) as two:
            await two.until(lambda: two.ups, "up with the planner's new key")
            await echoes(two, planner, 2, "n2")
        case.share("p0", "n1")
        await echoes(one, planner, 3)


@on_uvloop
async def test_half_copied_key_file_is_no_revocation(case: KeyCase, planner: RouterThread) -> None:
    async with running_link(at(planner), node="n1", keys=case.keys("n1")) as log:
        await log.until(lambda: log.ups)
        path = case.folder("p0") / f"n1{PUBLIC}"
        whole = path.read_bytes()
        path.write_bytes(whole[:-20])
        keys = planner.router._connections._keys
        assert keys is not None
        await log.until(lambda: path.name in keys.problems)
        await echoes(log, planner, 1)
        path.write_bytes(whole)
        await log.until(lambda: path.name not in keys.problems)
        assert not planner.downs("n1")


@on_uvloop
async def test_old_process_with_a_new_key_of_the_same_name_begins_anew(
    case: KeyCase, planner: RouterThread
) -> None:
    async with running_link(at(planner), node="n1", keys=case.keys("n1")) as log:
        await log.until(lambda: log.ups)
    revoke(case.folder("n1"), "n1")
    generate(case.folder("n1"), "n1")
    case.share("n1", "p0")
    async with running_link(at(planner), node="n1", keys=case.keys("n1")) as log:
        await log.until(lambda: log.ups)
        await echoes(log, planner, 1)


@on_uvloop
async def test_message_of_full_packets_passes_encrypted(
    case: KeyCase, planner: RouterThread
) -> None:
    async with running_link(at(planner), node="n1", keys=case.keys("n1")) as log:
        await log.until(lambda: log.ups)
        log.say(1, size=20 << 20)
        await log.until(lambda: log.numbers == [1])
        assert len(log.envelopes[0].frames[0]) == 20 << 20
        assert log.link.planners[0].end.statistics().resends == 0
