"""The control wire over real sockets: order, loss of connections, restarts, leaders and terms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from federation.cluster_events import PeerHeard, PeerSilent, PeerUp
from msd_client.contract.errors import ConfigError, ProtocolError
from tests.support.cluster_ends import LinkLog, RouterThread, on_uvloop, running_link
from tests.support.tcp_proxy import TcpProxy, tcp_proxy


@pytest.fixture
def router() -> Iterator[Callable[..., RouterThread]]:
    made: list[RouterThread] = []

    def make(**options: Any) -> RouterThread:
        made.append(RouterThread(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def proxied(router: Callable[..., RouterThread]) -> Iterator[tuple[RouterThread, TcpProxy]]:
    planner = router(answer=True)
    with tcp_proxy(planner.port) as proxy:
        yield planner, proxy


async def up(log: LinkLog) -> None:
    await log.until(lambda: log.ups, "up")


@on_uvloop
async def test_messages_of_both_ends_arrive_in_order(router: Callable[..., RouterThread]) -> None:
    planner = router(answer=True)
    async with running_link(planner.endpoint, facts={"cores": 4}) as log:
        await up(log)
        assert log.ups[0].term == log.link.term == 1
        for number in range(500):
            log.say(number)
        await log.until(lambda: len(log.numbers) >= 500, "echo")
        assert log.numbers == planner.heard("n1") == list(range(500))
        (first,) = [event for event in planner.events if isinstance(event, PeerUp)]
        assert first.hello == {"cores": 4}


@on_uvloop
async def test_ipc_needs_no_keys_either(router: Callable[..., RouterThread], tmp_path: Any) -> None:
    planner = router(endpoint=f"ipc://{tmp_path}/p", answer=True)
    async with running_link(planner.endpoint) as log:
        await up(log)
        log.say(7)
        await log.until(lambda: log.numbers == [7])


@on_uvloop
async def test_message_of_many_packets_arrives_whole(router: Callable[..., RouterThread]) -> None:
    planner = router(answer=True)
    async with running_link(planner.endpoint) as log:
        await up(log)
        log.say(1, size=40 << 20)
        assert not log.link.has_room
        log.say(2)
        await log.until(lambda: len(log.numbers) == 2)
        assert [len(envelope.frames[0]) for envelope in log.envelopes] == [40 << 20, 0]
        assert log.link.has_room


@on_uvloop
async def test_lost_connections_lose_no_message(
    proxied: tuple[RouterThread, TcpProxy],
) -> None:
    planner, proxy = proxied
    async with running_link(proxy.endpoint) as log:
        await up(log)
        for number in range(300):
            log.say(number, size=5_000)
            if number % 60 == 30:
                proxy.lose_after_bytes = proxy.carried_bytes + 40_000
            await log.until(lambda: len(planner.heard("n1")) > number - 50)  # noqa: B023
        await log.until(lambda: len(log.numbers) == 300)
        assert log.numbers == planner.heard("n1") == list(range(300))
        assert planner.ups("n1") == len(log.ups) == 1
        assert proxy.accepted > 1


@on_uvloop
async def test_cut_link_is_noticed_and_then_everything_arrives(
    proxied: tuple[RouterThread, TcpProxy],
) -> None:
    planner, proxy = proxied
    async with running_link(proxy.endpoint) as log:
        await up(log)
        proxy.cut()
        for number in range(20):
            log.say(number)
        await log.until(lambda: log.silences, "silence")
        await log.until(lambda: any(isinstance(one, PeerSilent) for one in planner.events))
        assert planner.tell("n1", 99)
        proxy.heal()
        await log.until(lambda: len(log.numbers) == 21)
        assert planner.heard("n1") == list(range(20))
        assert log.hearings == 1
        assert any(isinstance(one, PeerHeard) for one in planner.events)
        assert not log.downs and not planner.downs("n1")


@pytest.mark.parametrize("direction", ["cut_up", "cut_down"])
@on_uvloop
async def test_link_cut_in_one_direction_only_loses_nothing(
    proxied: tuple[RouterThread, TcpProxy], direction: str
) -> None:
    planner, proxy = proxied
    async with running_link(proxy.endpoint) as log:
        await up(log)
        getattr(proxy, direction)()
        for number in range(20):
            log.say(number)
        await log.until(
            lambda: log.silences or any(isinstance(one, PeerSilent) for one in planner.events)
        )
        proxy.heal()
        await log.until(lambda: len(log.numbers) == 20)
        assert log.numbers == list(range(20))
        assert not log.downs


@on_uvloop
@pytest.mark.soak
async def test_half_a_second_of_delay_and_lost_connections_change_nothing(
    proxied: tuple[RouterThread, TcpProxy],
) -> None:
    planner, proxy = proxied
    proxy.delay(0.5)
    async with running_link(proxy.endpoint) as log:
        await up(log)
        for number in range(40):
            log.say(number, size=1_000)
            if number in (10, 25):
                await log.until(lambda: len(log.numbers) >= number - 5)  # noqa: B023
                proxy.lose_connections()
        await log.until(lambda: len(log.numbers) == 40)
        assert log.numbers == planner.heard("n1") == list(range(40))
        assert not log.downs


@on_uvloop
async def test_restarted_node_is_told_of_and_its_old_messages_never_come(
    router: Callable[..., RouterThread],
) -> None:
    planner = router()
    async with running_link(planner.endpoint) as log:
        await up(log)
        log.say(1)
        await log.until(lambda: planner.heard("n1") == [1])
    async with running_link(planner.endpoint) as log:
        await up(log)
        log.say(2)
        await log.until(lambda: planner.heard("n1") == [1, 2])
        assert planner.ups("n1") == 2
        assert len(planner.downs("n1")) == 1


@on_uvloop
async def test_restarted_planner_is_followed_again_and_told_anew(
    router: Callable[..., RouterThread],
) -> None:
    planner = router(term=3)
    async with running_link(planner.endpoint) as log:
        await up(log)
        planner.close()
        log.say(1)
        again = router(endpoint=planner.endpoint, term=4)
        await log.until(lambda: len(log.ups) == 2)
        assert len(log.downs) == 1
        log.say(2)
        await log.until(lambda: again.heard("n1"))
        assert again.heard("n1") == [2]


@on_uvloop
async def test_highest_term_is_followed_and_an_older_one_never_obeyed(
    router: Callable[..., RouterThread],
) -> None:
    first, second = router(name="p0", term=5), router(name="p1", leads=False, term=0)
    async with running_link(first.endpoint, second.endpoint) as log:
        await log.until(lambda: log.ups and second.ups("n1"))
        assert first.tell("n1", 1, term=5)
        await log.until(lambda: log.numbers == [1])
        second.lead(6)
        await log.until(lambda: len(log.ups) == 2)
        assert log.ups[1].planner == "p1"
        assert log.link.term == 6
        log.say(10)
        await log.until(lambda: second.heard("n1") == [10])
        # The old leader woke: its orders are told apart by its term and by who sends them.
        await log.until(lambda: first.ups("n1") == 2)
        before = log.link.stale
        first.tell("n1", 2, term=5)
        second.tell("n1", 3, term=5)
        second.tell("n1", 4, term=6)
        await log.until(lambda: log.numbers == [1, 4])
        await log.until(lambda: log.link.stale >= before + 2)
        first.lead(4)
        first.tell("n1", 5, term=4)
        second.tell("n1", 6, term=6)
        await log.until(lambda: log.numbers == [1, 4, 6])
        assert len(log.ups) == 2
        assert log.link.leader is not None
        assert log.link.leader.planner == "p1"


@on_uvloop
async def test_leader_that_resigns_is_left_and_leads_again_with_a_new_term(
    router: Callable[..., RouterThread],
) -> None:
    planner = router(term=1)
    async with running_link(planner.endpoint) as log:
        await up(log)
        planner.lead(1, leads=False)
        await log.until(lambda: log.downs)
        log.say(1)
        planner.lead(2)
        await log.until(lambda: len(log.ups) == 2)
        log.say(2)
        await log.until(lambda: planner.heard("n1") == [2])
        planner.lead(3)
        await log.until(lambda: len(log.ups) == 3)
        assert len(log.downs) == 2


@on_uvloop
async def test_dropped_node_comes_again(router: Callable[..., RouterThread]) -> None:
    planner = router()
    async with running_link(planner.endpoint) as log:
        await up(log)
        await log.until(lambda: planner.ups("n1"))
        planner.do(lambda one: one.drop("n1", "asked by the test"))
        await log.until(lambda: len(log.ups) == 2)
        assert planner.downs("n1") == ["asked by the test"]
        log.say(3)
        await log.until(lambda: planner.heard("n1") == [3])


@on_uvloop
async def test_second_process_of_a_name_is_refused_while_the_first_lives(
    router: Callable[..., RouterThread],
) -> None:
    planner = router(answer=True)
    async with running_link(planner.endpoint) as log:
        await up(log)
        async with running_link(planner.endpoint) as rival:
            await log.until(lambda: rival.link.planners[0].refusal)
            assert "n1 is connected and alive" in rival.link.planners[0].refusal
            assert not rival.ups
            log.say(1)
            await log.until(lambda: log.numbers == [1])
    assert planner.ups("n1") == 1


@on_uvloop
async def test_message_over_the_limit_is_refused_where_it_is_sent(
    router: Callable[..., RouterThread],
) -> None:
    planner = router()
    async with running_link(planner.endpoint) as log:
        await up(log)
        with pytest.raises(ProtocolError, match="67108"):
            log.say(1, size=65 << 20)
        log.say(2)
        await log.until(lambda: planner.heard("n1") == [2])


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
@on_uvloop
async def test_without_keys_nothing_listens_off_this_machine(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="msdctl keys generate"):
        RouterThread(endpoint)
    with pytest.raises(ConfigError, match="msdctl keys generate"):
        async with running_link("tcp://10.0.0.1:5555"):
            pass
