"""Logs in to a real Jupyter server."""

import http.cookiejar
import json
import urllib.error
import urllib.parse
import urllib.request

from tests.waiting import WAIT_S


def login(url: str, password: str, path: str = "/api/kernels") -> object:
    """Return what this path has after logging in with the password, else the HTTP status."""
    parts = urllib.parse.urlsplit(url)
    base = f"http://{parts.netloc}"
    jar = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    opener.open(f"{base}/login", timeout=WAIT_S).read()
    xsrf = next(cookie.value for cookie in jar if cookie.name == "_xsrf")
    form = urllib.parse.urlencode({"password": password, "_xsrf": xsrf}).encode()
    try:
        opener.open(f"{base}/login", data=form, timeout=WAIT_S).read()
        with opener.open(f"{base}{path}", timeout=WAIT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as why:
        return why.code
