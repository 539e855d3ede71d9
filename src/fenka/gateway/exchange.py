"""One request and its response: what client, dispatcher and replica connection know in common."""

from typing import Protocol

from fenka.gateway.heads import RequestHead
from fenka.gateway.routing import Replica


class ClientSide(Protocol):
    """The client of an exchange, as the dispatcher uses it."""

    port: str
    """The name of the port that the client connected to."""

    def answer(self, status: int, sentence: str) -> None:
        """Answer the request with a response of the gateway's own."""

    def abort(self) -> None:
        """Let the client see that the response is incomplete."""

    def on_finished(self) -> None:
        """Go on to the next request: the response is complete."""


class ReplicaSide(Protocol):
    """The replica's side of an exchange, as the dispatcher uses it."""

    def send_body(self) -> None:
        """Send what has come of the request's body."""

    def abort(self) -> None:
        """End the request at once: nobody waits for the response."""

    def close(self) -> None:
        """End the connection after what was sent."""


class Exchange:
    """A request and its response.

    Attributes:
        client: The client.
        head: The head of the request.
        began_at: When the request came.
        body_bytes: Bytes of the request's body that no replica was sent yet.
        body_sent: A part of the body was sent to a replica.
        complete: The request came to its end.
        replica: The replica that the request is in flight at.
        upstream: The replica's side.
        retried: The request was sent a second time.
        status: The status of the response that the client is sent; 0 before its head.
        abandoned: The client has gone.
    """

    __slots__ = (
        "abandoned",
        "began_at",
        "body_bytes",
        "body_sent",
        "client",
        "complete",
        "head",
        "replica",
        "retried",
        "status",
        "upstream",
    )

    def __init__(self, client: ClientSide, head: RequestHead, began_at: float) -> None:
        self.client, self.head, self.began_at = client, head, began_at
        self.body_bytes = self.status = 0
        self.body_sent = self.complete = self.retried = self.abandoned = False
        self.replica: Replica | None = None
        self.upstream: ReplicaSide | None = None

    @property
    def size(self) -> int:
        """Return the bytes that no replica was sent yet."""
        return len(self.head.wire) + self.body_bytes


class Http1Client(ClientSide, Protocol):
    """A client's connection of HTTP/1.1, as a replica's uses it."""

    def send(self, data: bytes) -> None:
        """Send a part of the current response."""

    def closes(self) -> bool:
        """Return whether the connection ends after the current response in any case."""

    def on_connected(self) -> None:
        """Continue to read the current request: a replica takes it."""

    def on_switched(self) -> None:
        """Pass all bytes on from now on: the connection is a websocket."""

    def pause(self) -> None:
        """Stop reading: the replica does not read."""

    def resume(self) -> None:
        """Read again."""


class Http1Replica(ReplicaSide, Protocol):
    """A replica's connection of HTTP/1.1, as a client's uses it."""

    @property
    def unsent_bytes(self) -> int:
        """Return the bytes that the replica has not read."""

    def send(self, data: bytes) -> None:
        """Send bytes of a websocket."""

    def pause(self) -> None:
        """Stop reading: the client does not read."""

    def resume(self) -> None:
        """Read again."""


class Http1Exchange(Exchange):
    """An exchange of HTTP/1.1.

    Attributes:
        body: What no replica was sent yet of the request's body, framed as a replica gets it.
        closing: The client was sent that its connection ends with the response.
    """

    __slots__ = ("body", "closing")

    client: Http1Client
    upstream: Http1Replica | None

    def __init__(self, client: Http1Client, head: RequestHead, began_at: float) -> None:
        super().__init__(client, head, began_at)
        self.body = bytearray()
        self.closing = False

    def add_body(self, data: bytes) -> None:
        """Take a part of the body."""
        if self.head.chunked:
            data = b"%x\r\n%s\r\n" % (len(data), data)
        self.body += data
        self.body_bytes += len(data)

    def end_body(self) -> None:
        """Take the end of the request."""
        if self.head.chunked:
            self.body += b"0\r\n\r\n"
            self.body_bytes += 5
        self.complete = True

    def take_body(self) -> bytes:
        """Return what the replica is to be sent now."""
        if not self.body:
            return b""
        self.body_sent = True
        data, self.body, self.body_bytes = bytes(self.body), bytearray(), 0
        return data
