"""The clients that are connected to the daemon."""

import asyncio

import msgspec

from fenka import procfs
from fenka.hardware.peer_credentials import Process, process
from fenka.workstation import protocol
from fenka.workstation.job import Job


def account_of(process: Process) -> int:
    """Return the user that a process counts for in quotas and fair shares; its rights stay its own.

    A process in another user namespace may have any of thousands of IDs that its maker has there. It counts
    for the user who made the outermost of these namespaces, unless that is root, who has no quotas.
    """
    try:
        owner = procfs.user_namespace_owner(process.pid)
    except OSError:
        return process.uid
    # If it has ended, the PID may be another user's.
    return owner if owner and process.lives() else process.uid


class Client:
    """One connection, and the process that made it. Raises OSError if that process is gone."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.process = process(writer.get_extra_info("socket"))
        """It may have ended, while another process holds the connection."""
        self.account = account_of(self.process)
        """The user that it counts for in quotas and fair shares."""
        self.writer = writer
        self.job: str | None = None
        """The queue id, or the id of a gang's member, that this connection has requested."""

    @property
    def uid(self) -> int:
        """The user who connected."""
        return self.process.uid

    def made(self, job: Job) -> bool:
        """Return whether the process that connected is the one that requested the job."""
        return (self.process.pid, self.process.start_ticks) == (job.pid, job.start_ticks)

    def close(self) -> None:
        """Close the connection."""
        self.process.close()
        self.writer.close()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message without waiting.

        Queue positions are dropped while the client does not read, so that they cannot pile up. A closed
        connection is noticed when it is read.
        """
        stuck = self.writer.transport.get_write_buffer_size() > 0
        if not (stuck and isinstance(message, protocol.JobQueued)):
            self.writer.write(protocol.encode(message) + b"\n")


class ClientRegistry:
    """The connected clients by what they have requested: a queue id, or the id of a gang's member."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}

    def add(self, job: str, client: Client) -> None:
        """Register the client for a job. A client that was registered for it before is replaced."""
        client.job = job
        self._clients[job] = client

    def remove(self, client: Client) -> bool:
        """Unregister a client. Return False if it was not, or another has taken its place."""
        if client.job is None or self._clients.get(client.job) is not client:
            return False
        del self._clients[client.job]
        return True

    def send(self, job: str, message: protocol.Message) -> None:
        """Send a message to the client of a job, if one is connected."""
        client = self._clients.get(job)
        if client:
            client.send(message)
