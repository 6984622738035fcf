"""What the controlling process takes in from a rank on another host, in whatever portions it comes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from fsdp_testing.errors import PoolBroken
from fsdp_testing.ranks.pool.channel import Channel
from fsdp_testing.ranks.pool.hosts import Host, Place
from fsdp_testing.ranks.pool.jobs import Bootstrap, Exit, Report
from fsdp_testing.ranks.pool.remote_rank import Note, RemoteRank, Started, StartRank

START = StartRank(0, 2, Bootstrap(1, 2, "gloo", 0, {}, [], "", []), serves_store=False)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Channel]]:
    """This host's end of a connection, and the other one's."""
    here, there = socket.socketpair()
    with here, there:
        yield here, Channel(there)


def test_notes_that_come_with_the_answer_are_kept(ends: tuple[socket.socket, Channel]) -> None:
    """A rank may be in its world, or have died, before the controlling process reads that it was started (found as a
    world that "did not come together within 60 s" beside other work)."""
    here, host = ends
    host.send(Started(123, 4567))
    host.send(Note(reports=(Report(),), output={"stdout": "early"}))
    host.send(Note(exit=Exit(3, None, 0.0)))
    rank = RemoteRank("a host", here, START)
    assert (rank.pid, rank.store_port) == (123, 4567)
    assert host.receive() == START
    assert rank.channel.take_ready() == [Report()]
    assert rank.take_output("stdout") == "early"
    left = rank.read_exit()
    assert left is not None
    assert left.code == 3


def test_an_answer_that_comes_in_pieces_is_put_together(ends: tuple[socket.socket, Channel]) -> None:
    here, host = ends
    made: list[RemoteRank] = []
    waiting = threading.Thread(target=lambda: made.append(RemoteRank("a host", here, START)))
    waiting.start()
    assert host.receive() == START
    # What `Channel.send` would write, in two parts that are read one after the other.
    sender, reader = socket.socketpair()
    with sender, reader:
        Channel(sender).send(Started(123, 0))
        data = reader.recv(1 << 16)
    host._sock.sendall(data[:11])
    host._sock.sendall(data[11:])
    waiting.join(60)
    assert [rank.pid for rank in made] == [123]


@pytest.mark.parametrize("vanishes", [True, False])
def test_a_host_that_starts_no_rank_is_named(ends: tuple[socket.socket, Channel], vanishes: bool) -> None:
    here, host = ends
    if vanishes:
        host.close()
    else:
        host.send(Started(problem="no room"))
    with pytest.raises(PoolBroken, match=f"a host: expected a new rank, got {'no answer' if vanishes else 'no room'}"):
        RemoteRank("a host", here, START)


def test_an_answer_to_an_earlier_question_is_passed_over(ends: tuple[socket.socket, Channel]) -> None:
    here, other = ends
    host = Host(Place(1, "m", "", "127.0.0.1", 1, 1), b"", Channel(here))
    other.send(("/late", True))
    other.send(("/asked", False))
    assert not host.sees("/asked")
    other.send(("/late", False))
    other.send(("/asked", True))
    assert host.sees("/asked")
    other.close()
    assert not host.sees("/asked")
