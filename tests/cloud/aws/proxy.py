"""A proxy in front of moto's server, both on loopback: tokens, faults, delays and calls of its own."""

import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qsl, urlencode
from xml.sax.saxutils import escape

import boto3
from moto.server import ThreadedMotoServer

REGION = "us-east-1"
KEYS = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": REGION}

Form = Mapping[str, str]
Fault = Literal["lose call", "lose answer", "throttle", "fail"]


class Refusal(Exception):
    """AWS says no."""

    def __init__(self, code: str, message: str = "no", status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


class Proxy:
    """Passes calls on to moto, except for `own` ones. `reset` begins a test, `close` ends both servers.

    Attributes:
        own: actions that are answered here.
        faults: of the next calls of each action.
        forms: all calls, in their order.
        hold: actions that wait until their event is set.
        page: how many reservations a page of DescribeInstances has, None for moto's number.
        unlisted: instances that DescribeInstances does not list yet.
    """

    own: Mapping[str, Callable[[Form], str]]

    def __init__(self) -> None:
        self._moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._moto.start()
        host, port = self._moto.get_host_and_port()
        self._behind = f"http://{host}:{port}"
        self.ec2: Any = boto3.client("ec2", endpoint_url=self._behind, **KEYS)
        self.autoscaling: Any = boto3.client("autoscaling", endpoint_url=self._behind, **KEYS)
        self._one_call = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def reset(self) -> None:
        """Forget everything."""
        whole = urllib.request.Request(f"{self._behind}/moto-api/reset", method="POST")
        urllib.request.urlopen(whole).close()
        self.faults: dict[str, list[Fault | None]] = {}
        self.page: int | None = None
        self.forms: list[dict[str, str]] = []
        self.hold: dict[str, threading.Event] = {}
        self.unlisted: set[str] = set()
        self._answers: dict[tuple[str, str], tuple[dict[str, str], int, bytes]] = {}

    def close(self) -> None:
        """End both servers."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._moto.stop()

    def answer(self, form: dict[str, str], headers: Mapping[str, str]) -> tuple[int, bytes] | None:
        """Return status and body of a call; None if its connection breaks."""
        action = form["Action"]
        self.forms.append(form)
        if action in self.hold:
            self.hold[action].wait(60)
        fault = self.faults[action].pop(0) if self.faults.get(action) else None
        if fault == "lose call":
            return None
        if fault in {"throttle", "fail"}:
            code = "RequestLimitExceeded" if fault == "throttle" else "InternalError"
            return 503, _error(form, Refusal(code))
        result = self._once(form, headers)
        return None if fault == "lose answer" else result

    def _once(self, form: dict[str, str], headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Answer; with a token that was used before, as the first time."""
        own = self.own.get(form["Action"])
        token = form.get("ClientToken")
        with self._one_call:
            if own is None:
                return self._pass_on(form, headers)
            key = form["Action"], token or ""
            known = self._answers.get(key) if token else None
            if known is not None:
                if known[0] != form:
                    return 400, _error(form, Refusal("IdempotentParameterMismatch"))
                return known[1:]
            try:
                status, body = 200, own(form).encode()
            except Refusal as why:
                return why.status, _error(form, why)
            if token:
                self._answers[key] = form, status, body
            return status, body

    def _pass_on(self, form: dict[str, str], headers: Mapping[str, str]) -> tuple[int, bytes]:
        sent = {k: v for k, v in headers.items() if k.lower() not in {"host", "content-length"}}
        if form["Action"] == "DescribeInstances" and self.unlisted:
            form = form | _filter_out(form, self._listed())
        if form["Action"] == "DescribeInstances" and self.page:
            form = form | {"MaxResults": str(self.page)}
        request = urllib.request.Request(self._behind, urlencode(form).encode(), sent)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as why:
            return why.code, why.read()

    def _listed(self) -> list[str]:
        pages = self.ec2.describe_instances()["Reservations"]
        ids = [each["InstanceId"] for them in pages for each in them["Instances"]]
        return [each for each in ids if each not in self.unlisted] or ["i-none"]


def _handler(proxy: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            result = proxy.answer(dict(parse_qsl(body, keep_blank_values=True)), dict(self.headers))
            if result is None:
                self.close_connection = True
                return
            status, text = result
            self.send_response(status)
            self.send_header("Content-Type", "text/xml")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Keep silent."""

    return Handler


def _filter_out(form: Form, ids: Sequence[str]) -> dict[str, str]:
    """Return parameters that leave out what is not listed yet."""
    number = 1 + sum(key.startswith("Filter.") and key.endswith(".Name") for key in form)
    values = {f"Filter.{number}.Value.{at}": each for at, each in enumerate(ids, 1)}
    return {f"Filter.{number}.Name": "instance-id"} | values


def document(name: str, **content: Any) -> str:
    """Return an answer as XML."""
    return f"<{name}>{_xml(content | {'requestId': 'r-1'})}</{name}>"


def _xml(value: Any) -> str:
    """Return XML; a list repeats its element."""
    if not isinstance(value, Mapping):
        return escape(str(value))
    return "".join(
        f"<{name}>{_xml(each)}</{name}>"
        for name, inner in value.items()
        for each in (inner if isinstance(inner, list) else [inner])
    )


def _error(form: Form, why: Refusal) -> bytes:
    error = {"Code": why.code, "Message": str(why)}
    if form.get("Version") == "2011-01-01":
        return document("ErrorResponse", Error=error).encode()
    return document("Response", Errors={"Error": error}).encode()
