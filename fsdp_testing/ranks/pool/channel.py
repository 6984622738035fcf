"""Messages between controller and rank: length-prefixed pickles over one inherited socket pair.

Trust: only the controller and its own child hold the nameless socket pair, so no other process can send a pickle.
Tensors travel as raw bytes with dtype and shape, not through `torch.load`.
"""

from __future__ import annotations

import io
import pickle
import select
import socket
import struct
import sys
import types
from functools import reduce
from typing import Any, Protocol

from fsdp_testing.ranks.pool.targets import MAIN_COPY

_HEADER = struct.Struct("<Q")
_CHUNK = 1 << 20
# Nearly all messages are shorter. A megabyte would be mapped and unmapped for each of them.
_FIRST_CHUNK = 1 << 16


def rebuild_tensor(data: bytes, dtype: str, shape: tuple[int, ...], requires_grad: bool, is_parameter: bool) -> Any:
    """Make the tensor that `reduce_tensor` reduced."""
    import torch

    kind = getattr(torch, dtype)
    count = 1
    for extent in shape:
        count *= extent
    tensor = torch.frombuffer(bytearray(data), dtype=kind) if count else torch.empty(0, dtype=kind)
    if shape != (count,):
        tensor = tensor.reshape(shape)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def reduce_tensor(tensor: Any) -> tuple[Any, ...]:
    """Reduce a strided tensor to its bytes, as `reducer_override` and `dispatch_table` of a pickler want it.

    The copy is contiguous, on the CPU and a leaf; it keeps dtype, shape, `requires_grad` and whether it is a parameter.
    """
    import torch

    try:
        data = tensor.detach().numpy().tobytes()  # most of what ranks report; this path is several times as fast
    except (
        TypeError,
        RuntimeError,
    ):  # on a device, lazily conjugated or negated, or of a dtype that numpy does not know
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    dtype = str(tensor.dtype).removeprefix("torch.")
    parameter = type(tensor) is torch.nn.Parameter
    return rebuild_tensor, (data, dtype, tuple(tensor.shape), bool(tensor.requires_grad), parameter)


def of_main(qualname: str) -> Any:
    """Find what the script of this process calls `qualname`."""
    return reduce(getattr, qualname.split("."), sys.modules["__main__"])


class _Pickler(pickle.Pickler):
    """Pickle that sends plain strided tensors as bytes (on CPU, contiguous), and objects of a script by name."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, types.FunctionType)):
            # A rank runs the controller's script under another name than the controller does.
            return (of_main, (value.__qualname__,)) if value.__module__ == MAIN_COPY else NotImplemented
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(value, torch.Tensor):
            return NotImplemented
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return NotImplemented
        if value.device.type == "meta" or value.is_quantized:
            return NotImplemented
        return reduce_tensor(value)


def dumps(value: object) -> bytes:
    """Serialise `value`; raises whatever pickle raises for a value that cannot travel."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def loads(data: bytes | bytearray) -> Any:
    """Inverse of `dumps`."""
    return pickle.loads(data)


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


Source = int | _HasDescriptor


def readable(descriptor: Source, seconds: float = 0.0) -> bool:
    """Wait until there is something to read or the peer has gone; False after `seconds`."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN | select.POLLHUP)
    return bool(poll.poll(max(0.0, seconds) * 1000))


class Channel:
    """One end of a controller-rank connection.

    The controller reads with `take_ready` (never blocks, tolerates a peer that stops in the middle of a message);
    a rank reads with `receive` (blocks until a message or the end of the controller). Bytes that are no message (a rank's
    code wrote to the descriptor) close the channel, and `problem` says so.
    """

    def __init__(self, sock: socket.socket, *, send_timeout: float | None = None) -> None:
        self._sock = sock
        self._pending = bytearray()
        self._closed = False
        self._send_timeout = send_timeout
        self.problem = ""

    def fileno(self) -> int:
        """Descriptor for selectors; -1 once closed."""
        return self._sock.fileno()

    @property
    def closed(self) -> bool:
        """True when the peer has gone or `close` was called."""
        return self._closed

    def send(self, message: object) -> None:
        """Send one message. Raises `OSError` when the peer has gone or does not read within `send_timeout`."""
        self.send_data(dumps(message))

    def send_data(self, data: bytes) -> None:
        """Send a message that `dumps` has serialised; a message for several ranks is serialised once."""
        header = _HEADER.pack(len(data))
        # Set by each call for itself: sending may wait, reading in the controller must not, and both use one socket.
        self._sock.settimeout(self._send_timeout)
        # A long message is not copied to put a header before it.
        if len(data) < _CHUNK:
            self._sock.sendall(header + data)
        else:
            self._sock.sendall(header)
            self._sock.sendall(data)

    def receive(self) -> Any:
        """Wait for one message. Raises `EOFError` when the peer has gone."""
        self._sock.settimeout(None)
        while True:
            message = self._next()
            if message is not None:
                return message[0]
            try:
                data = self._read()
            except OSError:
                data = b""
            if not data:
                self._closed = True
                raise EOFError("the other end of the channel has gone")
            self._pending += data

    def take_ready(self) -> list[Any]:
        """Return every message that is complete by now; sets `closed` at the end of the stream."""
        if not self._closed:
            self._sock.settimeout(0.0)
        while not self._closed:
            try:
                data = self._read()
            except BlockingIOError:
                break
            except OSError:  # reset; or a host without power: timed out, unreachable, network down
                data = b""
            if not data:
                self._closed = True
            self._pending += data
        # After the end of the stream too: what a rank sent before it died counts.
        messages: list[Any] = []
        try:
            while (message := self._next()) is not None:
                messages.append(message[0])
        except Exception as error:  # pickle raises anything for bytes that are no pickle
            self._closed = True
            self.problem = f"{type(error).__name__}: {error}"
        return messages

    def at_end(self) -> bool:
        """Return whether the peer has gone, without reading what it sent before."""
        if self._closed:
            return True
        self._sock.settimeout(0.0)
        try:
            return not self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _read(self) -> bytes:
        return self._sock.recv(_CHUNK if len(self._pending) >= _FIRST_CHUNK else _FIRST_CHUNK)

    def _next(self) -> tuple[Any] | None:
        if len(self._pending) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._pending)
        end = _HEADER.size + length
        if len(self._pending) < end:
            return None
        data = self._pending[_HEADER.size : end]
        # Removed before it is read: bytes that are no pickle must not be read again.
        del self._pending[:end]
        return (loads(data),)

    def close(self) -> None:
        """Close this end; safe to call twice."""
        self._closed = True
        self._sock.close()
