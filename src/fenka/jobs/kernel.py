"""Runs code in a kernel of a Jupyter server, as its web page does.

A REST request starts the kernel. Code and output use Jupyter's messaging protocol 5.3 over a WebSocket.
"""

import json
import urllib.parse
import urllib.request
import uuid
from typing import Any

from fenka.core.errors import FenkaError

REPLY_TIMEOUT_S = 60.0


class KernelFailed(FenkaError):
    """The code raised an exception; the message is that of the kernel."""


class Kernel:
    """A kernel of the server at `url` (with its token, as `fenka notebook` prints it)."""

    def __init__(self, url: str) -> None:
        import websocket

        parts = urllib.parse.urlsplit(url)
        token = urllib.parse.parse_qs(parts.query).get("token", [""])[0]
        header = {"Authorization": f"token {token}"}
        request = urllib.request.Request(
            f"http://{parts.netloc}/api/kernels", data=b"{}", headers=header, method="POST"
        )
        with urllib.request.urlopen(request, timeout=REPLY_TIMEOUT_S) as answer:
            self.id: str = json.load(answer)["id"]
        self._channel = websocket.create_connection(
            f"ws://{parts.netloc}/api/kernels/{self.id}/channels",
            header=header,
            timeout=REPLY_TIMEOUT_S,
        )

    def run(self, code: str) -> str:
        """Return what the code prints. Raises KernelFailed with the last line of its traceback."""
        message_id = uuid.uuid4().hex
        self._channel.send(json.dumps(_execute_request(message_id, code)))
        printed: list[str] = []
        while True:
            message: dict[str, Any] = json.loads(self._channel.recv())
            if message.get("parent_header", {}).get("msg_id") != message_id:
                continue
            content = message["content"]
            match message["header"]["msg_type"]:
                case "stream":
                    printed.append(content["text"])
                case "error":
                    raise KernelFailed(f"{content['ename']}: {content['evalue']}")
                case "status" if content["execution_state"] == "idle":
                    return "".join(printed)

    def close(self) -> None:
        """Close the connection; the kernel keeps running."""
        self._channel.close()


def _execute_request(message_id: str, code: str) -> dict[str, Any]:
    return {
        "header": {
            "msg_id": message_id,
            "msg_type": "execute_request",
            "username": "fenka",
            "session": uuid.uuid4().hex,
            "version": "5.3",
        },
        "parent_header": {},
        "metadata": {},
        "content": {"code": code, "silent": False, "store_history": False, "allow_stdin": False},
        "channel": "shell",
        "buffers": [],
    }
