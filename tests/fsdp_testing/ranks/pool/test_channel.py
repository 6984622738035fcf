"""Messages arrive whole, in order and in parts; a peer that stops or writes nonsense is noticed, never waited for."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch

from fsdp_testing.ranks.pool.channel import Channel, dumps, loads


@pytest.fixture
def pair() -> Iterator[tuple[Channel, socket.socket]]:
    mine, theirs = socket.socketpair()
    channel = Channel(mine)
    yield channel, theirs
    channel.close()
    theirs.close()


def framed(message: object) -> bytes:
    data = dumps(message)
    return struct.pack("<Q", len(data)) + data


def test_a_message_in_single_bytes(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    data = framed({"a": [1, 2]})
    for byte in data[:-1]:
        peer.sendall(bytes([byte]))
        assert channel.take_ready() == []
    peer.sendall(data[-1:])
    assert channel.take_ready() == [{"a": [1, 2]}]
    assert not channel.closed


def test_several_messages_at_once_and_the_start_of_one_more(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    last = framed("third")
    peer.sendall(framed("first") + framed("second") + last[:5])
    assert channel.take_ready() == ["first", "second"]
    peer.sendall(last[5:])
    assert channel.receive() == "third"


def test_receive_keeps_what_came_after(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(framed(1) + framed(2))
    assert [channel.receive(), channel.receive()] == [1, 2]


def test_a_peer_that_dies_in_the_middle(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(framed("whole") + framed("x" * 100)[:50])
    peer.close()
    assert channel.take_ready() == ["whole"]
    assert channel.closed
    assert channel.problem == ""
    assert channel.take_ready() == []


def test_receive_at_the_end(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    peer.close()
    with pytest.raises(EOFError):
        channel.receive()


class Unpowered:
    """A connection to a host whose power is gone: nobody closed it, the kernel's own probes have had no answer."""

    def __init__(self, number: int) -> None:
        self.number = number

    def settimeout(self, seconds: float | None) -> None:
        pass

    def recv(self, count: int, flags: int = 0) -> bytes:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ECONNRESET])
def test_a_host_without_power_is_a_peer_that_has_gone(number: int) -> None:
    channel = Channel(cast("socket.socket", Unpowered(number)))
    assert channel.at_end()
    assert channel.take_ready() == []
    assert channel.closed
    with pytest.raises(EOFError):
        Channel(cast("socket.socket", Unpowered(number))).receive()


def test_nothing_is_no_end(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    assert channel.take_ready() == []
    assert not channel.closed
    assert not channel.at_end()
    peer.close()
    assert channel.at_end()
    assert not channel.closed, "looking is not reading"


def test_looking_for_the_end_loses_nothing(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(framed("kept"))
    assert not channel.at_end()
    peer.close()
    assert not channel.at_end(), "what was sent before comes first"
    assert channel.take_ready() == ["kept"]


def test_nonsense_is_named(pair: tuple[Channel, socket.socket]) -> None:
    channel, peer = pair
    peer.sendall(struct.pack("<Q", 3) + b"abc")
    assert channel.take_ready() == []
    assert channel.closed
    assert "UnpicklingError" in channel.problem or "Error" in channel.problem


def test_a_peer_that_does_not_read(pair: tuple[Channel, socket.socket]) -> None:
    mine, theirs = socket.socketpair()
    channel = Channel(mine, send_timeout=0.05)
    with pytest.raises(OSError, match="timed out"):
        channel.send(b"x" * 50_000_000)
    channel.close()
    theirs.close()


def test_sending_after_reading_still_blocks(pair: tuple[Channel, socket.socket]) -> None:
    """`take_ready` makes the socket non-blocking; a long message must still go out whole."""
    import threading

    channel, peer = pair
    channel.take_ready()
    received = bytearray()

    def read() -> None:
        while len(received) < 20_000_008:
            received.extend(peer.recv(1 << 16))

    thread = threading.Thread(target=read)
    thread.start()
    channel.send(bytearray(20_000_000 - (len(dumps(bytearray(20_000_000))) - 20_000_000)))
    thread.join()
    assert len(loads(received[8:])) > 19_999_000


def test_close_twice(pair: tuple[Channel, socket.socket]) -> None:
    channel, _ = pair
    channel.close()
    channel.close()
    assert channel.closed
    assert channel.fileno() == -1


# ---- what travels

VALUES: dict[str, Any] = {
    "float32": torch.arange(6.0).reshape(2, 3),
    "bfloat16": torch.tensor([1.0, -2.5], dtype=torch.bfloat16),
    "float8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "expanded": torch.ones(1).expand(5),
    "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", VALUES)
def test_tensors_arrive_bit_for_bit(name: str) -> None:
    value = VALUES[name]
    got = loads(dumps({"t": value}))["t"]
    assert got.dtype == value.dtype
    assert got.shape == value.shape
    if value.layout == torch.strided:
        plain = value.resolve_conj().contiguous()
        assert bytes(got.contiguous().flatten().view(torch.uint8)) == bytes(plain.flatten().view(torch.uint8))
    else:
        assert torch.equal(got.to_dense(), value.to_dense())


def test_parameters_and_grad_flags() -> None:
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    leaf = torch.ones(3, requires_grad=True)
    result = (leaf * 2).requires_grad_()
    got = loads(dumps([parameter, leaf, result]))
    assert type(got[0]) is torch.nn.Parameter
    assert [value.requires_grad for value in got] == [False, True, True]
    assert all(value.is_leaf for value in got)


def test_one_tensor_twice_is_one_tensor() -> None:
    value = torch.ones(2)
    first, second = loads(dumps((value, value)))
    assert first is second


def test_what_arrives_can_be_written() -> None:
    got = loads(dumps(torch.ones(3)))
    got += 1
    assert got.tolist() == [2.0, 2.0, 2.0]


def test_meta_tensors_keep_their_shape() -> None:
    got = loads(dumps(torch.empty(3, 4, device="meta")))
    assert got.device.type == "meta"
    assert got.shape == (3, 4)


def test_modules_and_state_dicts() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    got = loads(dumps(module))
    for name, value in module.state_dict().items():
        assert torch.equal(got.state_dict()[name], value)
