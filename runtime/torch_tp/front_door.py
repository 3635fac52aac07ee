"""Where workers of other hosts knock: a connection is nobody until its first message is a HELLO with the token and an awaited id."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
from collections.abc import Callable, Sequence

from runtime.torch_tp.orders import Hello
from runtime.torch_tp.protocol import FrameReader, Kind, Message, ProtocolError, tokens_match, unpack
from runtime.torch_tp.worker_link import WorkerLink

logger = logging.getLogger(__name__)

STRANGERS_MAX = 16
PATIENCE_S = 10.0


class FrontDoor:
    """A listening socket and those who have not yet said who they are."""

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        links: Sequence[WorkerLink],
        selector: selectors.BaseSelector,
        welcome: Callable[[WorkerLink, socket.socket, Sequence[Message]], None],
        now_s: Callable[[], float],
    ) -> None:
        """welcome: takes over a worker's socket, with the messages that came through it already. Raises: OSError when the port is taken."""
        self._token, self._links, self._selector, self._welcome, self._now_s = token, links, selector, welcome, now_s
        self._strangers: dict[socket.socket, tuple[FrameReader, float]] = {}
        self._listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listener.setblocking(False)
        selector.register(self._listener, selectors.EVENT_READ, self._accept)

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{host}:{port}"

    def expire(self) -> None:
        """Turn away who has been silent for too long."""
        for stranger, (_, since_s) in list(self._strangers.items()):
            if self._now_s() - since_s > PATIENCE_S:
                self._forget(stranger)

    def close(self) -> None:
        for stranger in list(self._strangers):
            self._forget(stranger)
        self._listener.close()

    def _accept(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            stranger, peer = self._listener.accept()
            if len(self._strangers) >= STRANGERS_MAX:
                logger.warning("connection refused peer=%s reason=too_many", peer)
                stranger.close()
                return
            stranger.setblocking(False)
            stranger.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._strangers[stranger] = (FrameReader(), self._now_s())
            self._selector.register(stranger, selectors.EVENT_READ, lambda mask: self._hear(stranger))

    def _hear(self, stranger: socket.socket) -> None:
        reader, _ = self._strangers[stranger]
        try:
            data = stranger.recv(1 << 16)
            messages = list(reader.feed(data))
            if data and not messages:
                return
            if not messages or messages[0].kind is not Kind.HELLO:
                raise ProtocolError("the first message is no HELLO")
            link = self._link_of(unpack(Hello, messages[0].body))
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            logger.warning("connection refused reason=%s", error)
            self._forget(stranger)
            return
        self._selector.unregister(stranger)
        del self._strangers[stranger]
        self._welcome(link, stranger, messages)

    def _link_of(self, hello: Hello) -> WorkerLink:
        if not tokens_match(hello.token, self._token):
            raise ProtocolError("HELLO with a wrong token")
        if not 0 <= hello.worker < len(self._links) or not self._links[hello.worker].settings.is_remote:
            raise ProtocolError(f"HELLO of worker {hello.worker}, which is no remote rank here")
        link = self._links[hello.worker]
        if link.connection is not None:
            raise ProtocolError(f"HELLO of worker {hello.worker}, which is connected already")
        return link

    def _forget(self, stranger: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(stranger)
        self._strangers.pop(stranger, None)
        stranger.close()
