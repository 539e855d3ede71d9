"""Talk to the model server by events, a websocket and gRPC. Arguments: HOST, HTTP's port, gRPC's port.

Print what was received as JSON. Times are seconds since the request.
"""

import json
import sys
import time
import urllib.request
from typing import Any

import grpc
import websocket

TIMEOUT_S, COUNT = 60, 5


def events(host: str, port: str) -> list[tuple[float, str]]:
    """Return the events of a response, and when each came."""
    began, received = time.monotonic(), []
    url = f"http://{host}:{port}/stream?count={COUNT}"
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
        for line in response:
            if line.strip():
                received.append((time.monotonic() - began, line.decode().strip()))
    return received


def echoes(host: str, port: str) -> list[str]:
    """Return the answers of a websocket, each to a message that was sent after the last answer."""
    socket = websocket.create_connection(f"ws://{host}:{port}/echo", timeout=TIMEOUT_S)
    answers = []
    for number in range(1, COUNT + 1):
        socket.send(str(number))
        answers.append(str(socket.recv()))
    socket.close()
    return answers


def calls(host: str, port: str) -> tuple[str, list[tuple[float, str]]]:
    """Return the answer to one call, and the messages of another one with their times."""
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        predict: Any = channel.unary_unary("/model.Model/Predict")
        count: Any = channel.unary_stream("/model.Model/Count")
        one = predict(b"7", timeout=TIMEOUT_S, wait_for_ready=True).decode()
        began = time.monotonic()
        messages = count(b"%d" % COUNT, timeout=TIMEOUT_S)
        return one, [(time.monotonic() - began, message.decode()) for message in messages]


def main(host: str, http_port: str, grpc_port: str) -> None:
    """Print what all clients receive."""
    call, stream = calls(host, grpc_port)
    received = {"events": events(host, http_port), "echoes": echoes(host, http_port)}
    print(json.dumps({**received, "call": call, "stream": stream}))


main(*sys.argv[1:])
