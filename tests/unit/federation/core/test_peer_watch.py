"""Whether peers answer."""

from __future__ import annotations

from federation.core.peer_watch import (
    SECOND_NS,
    PeerChanged,
    PeerForgot,
    PeerWatch,
    Reconnect,
    SendPing,
)


def tick(watch: PeerWatch, seconds: float) -> list[object]:
    watch.tick(int(seconds * SECOND_NS))
    return list(watch.effects())


def up() -> PeerWatch:
    """Return a watch of one peer that answered at 0 s."""
    watch = PeerWatch()
    watch.add("a", 0)
    assert tick(watch, 0) == [SendPing("a", 1)]
    watch.pong("a", 7, 0)
    assert watch.effects() == [PeerChanged("a", True, "")]
    assert watch.up() == ["a"]
    return watch


def test_a_peer_is_asked_every_second() -> None:
    watch = up()
    assert tick(watch, 0.9) == []
    assert watch.due_ns() == SECOND_NS
    assert tick(watch, 1.0) == [SendPing("a", 2)]
    assert tick(watch, 1.5) == []


def test_silence_is_told_once_and_the_link_made_anew_ever_less_often() -> None:
    watch = up()
    seen = [(at, effect) for at in range(60) for effect in tick(watch, at)]
    told = [(at, effect) for at, effect in seen if not isinstance(effect, SendPing)]
    assert told[0] == (5, PeerChanged("a", False, "it has not answered for 5.0 s"))
    assert [at for at, effect in told[1:] if effect == Reconnect("a")] == [5, 7, 11, 19, 35, 51]
    assert len(told) == 7
    watch.pong("a", 7, 60 * SECOND_NS)
    assert watch.effects() == [PeerChanged("a", True, "")]


def test_anything_that_a_peer_sends_is_life() -> None:
    watch = up()
    for at in range(1, 20):
        watch.heard("a", at * SECOND_NS)
        assert not [effect for effect in tick(watch, at) if isinstance(effect, PeerChanged)]


def test_a_lost_link_is_told_at_once_and_a_new_one_means_asking_again() -> None:
    watch = up()
    watch.unlinked("a", "the link is lost")
    watch.unlinked("a", "the link is lost")
    assert watch.effects() == [PeerChanged("a", False, "the link is lost")]
    watch.linked("a", SECOND_NS)
    assert watch.effects() == [SendPing("a", 2), PeerForgot("a")]
    watch.pong("a", 7, SECOND_NS)
    assert watch.effects() == [PeerChanged("a", True, "")]


def test_another_process_at_the_other_end_means_asking_again() -> None:
    watch = up()
    watch.pong("a", 8, 0)
    assert watch.effects() == [PeerForgot("a")]
    watch.pong("a", 8, 0)
    assert watch.effects() == []


def test_a_peer_that_never_answered_is_told_with_what_is_known() -> None:
    watch = PeerWatch()
    watch.add("a", 0)
    watch.add("b", 0)
    refused = "it refuses this node's key"
    for reason in (refused, "the link is lost", refused):
        watch.unlinked("b", reason)
    assert watch.effects() == [
        PeerChanged("b", False, refused),
        PeerChanged("b", False, "the link is lost"),
    ]
    tick(watch, 1)
    told = [effect for effect in tick(watch, 2) if not isinstance(effect, SendPing)]
    assert told == [
        PeerChanged("a", False, "it does not answer"),
        Reconnect("a"),
        Reconnect("b"),
    ]


def test_a_removed_peer_is_watched_no_longer() -> None:
    watch = up()
    watch.remove("a")
    assert watch.effects() == [PeerChanged("a", False, "it is no peer any more")]
    watch.pong("a", 7, 0)
    watch.heard("a", 0)
    watch.linked("a", 0)
    watch.unlinked("a", "x")
    watch.remove("a")
    assert tick(watch, 100) == []
    assert watch.due_ns() is None
