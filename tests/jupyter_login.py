"""Logs in to a real Jupyter server."""

import http.cookiejar
import json
import urllib.error
import urllib.parse
import urllib.request

from tests.waiting import WAIT_S


def login(url: str, password: str, path: str = "/api/kernels") -> object:
    """Return what this path has after logging in with the password, else the HTTP status."""
    try:
        with _logged_in(url, password)[0].open(_request(url, path), timeout=WAIT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as why:
        return why.code


def logged_in(url: str, password: str) -> str:
    """Return the cookies of a browser that has logged in with the password."""
    _, jar = _logged_in(url, password)
    return "; ".join(f"{cookie.name}={cookie.value}" for cookie in jar)


def _request(url: str, path: str, data: bytes | None = None) -> urllib.request.Request:
    # Python asks the system for the name, which may not resolve it as browsers do.
    parts = urllib.parse.urlsplit(url)
    headers = {"Host": parts.netloc}
    return urllib.request.Request(f"http://127.0.0.1:{parts.port}{path}", data, headers)


def _logged_in(
    url: str, password: str
) -> tuple[urllib.request.OpenerDirector, http.cookiejar.CookieJar]:
    jar = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    opener.open(_request(url, "/login"), timeout=WAIT_S).read()
    xsrf = next(cookie.value for cookie in jar if cookie.name == "_xsrf")
    form = urllib.parse.urlencode({"password": password, "_xsrf": xsrf}).encode()
    opener.open(_request(url, "/login", form), timeout=WAIT_S).read()
    return opener, jar
