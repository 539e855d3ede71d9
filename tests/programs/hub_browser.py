"""A browser for JupyterHub in the network namespace where it is started, with a session for each user.

Each line of standard input is a JSON request, and is answered by a line: status, URL and text.

    user: Who sends it. The first request of a user signs in.
    path: At the hub; if it begins with /user/, at its proxy.
    method: GET, or another one.
    form: The fields of a form; None for none.
    json: A JSON body; None for none.
    events: Return after as many events of a stream; 0 for its end.
"""

import http.cookiejar
import json
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

PROXY, HUB = "http://127.0.0.1:8000", "http://127.0.0.1:981"
"""The hub is asked directly, since the proxy of the tests holds streams back."""
TIMEOUT_S = 100
TOKEN = re.compile(r'xsrf_token: "([^"]+)"')
"""Against forged forms, in each page."""


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects at the hub; it has not the servers to which its proxy leads."""

    def redirect_request(self, *arguments: Any) -> urllib.request.Request | None:
        """Return the next request, or None to end with this answer."""
        path = urllib.parse.urlsplit(arguments[-1]).path
        return None if path.startswith("/user/") else super().redirect_request(*arguments)


class Session:
    """The cookies of one user."""

    def __init__(self, user: str) -> None:
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self.opener = urllib.request.build_opener(cookies, Redirects)
        self.token = ""
        self.send({"path": "/hub/login"})
        self.send({"path": "/hub/login", "form": {"username": user, "password": "password"}})

    def send(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer."""
        data, path = None, request["path"]
        headers = {
            "Accept": "text/html,application/json",
            # Only pages set the cookie of the token. Without it a token is good for the rest of a second.
            "Sec-Fetch-Mode": "cors" if path.startswith("/hub/api/") else "navigate",
            "X-XSRFToken": self.token,
        }
        if (form := request.get("form")) is not None:
            data = urllib.parse.urlencode({**form, "_xsrf": self.token}, doseq=True).encode()
        if request.get("json") is not None:
            data = json.dumps(request["json"]).encode()
            headers["Content-Type"] = "application/json"
        method = request.get("method", "POST" if data else "GET")
        # The proxy's own error pages would replace the cookies by those of a stranger.
        at_hub = not path.startswith("/user/")
        place = HUB if at_hub else PROXY
        opener = self.opener if at_hub else urllib.request.build_opener()
        message = urllib.request.Request(place + path, data, headers, method=method)
        try:
            with opener.open(message, timeout=TIMEOUT_S) as answer:
                text = read(answer, request.get("events", 0))
                if at_hub and (found := TOKEN.search(text)):
                    self.token = found[1]
                return {"status": answer.status, "url": answer.url, "text": text}
        except urllib.error.HTTPError as why:
            text = why.read().decode(errors="replace")
            return {"status": why.code, "url": why.url, "text": text}
        except OSError as why:
            return {"status": 0, "url": "", "text": str(why)}


def read(answer: Any, events: int) -> str:
    """Return the text of an answer, or so many events of a stream."""
    if not events:
        return str(answer.read().decode(errors="replace"))
    lines: list[str] = []
    for line in answer:
        if line.startswith(b"data:"):
            lines.append(line.decode().removeprefix("data:").strip())
        if len(lines) == events:
            break
    return "\n".join(lines)


def main() -> None:
    """Answer requests until the end of standard input."""
    sessions: dict[str, Session] = {}
    for line in sys.stdin:
        request = json.loads(line)
        user = request["user"]
        try:
            if user not in sessions:
                sessions[user] = Session(user)
            answer = sessions[user].send(request)
        except OSError as why:
            answer = {"status": 0, "url": "", "text": str(why)}
        print(json.dumps(answer), flush=True)


main()
