"""Log in to a notebook as a browser does, and run code in a new kernel. Arguments: URL PASSWORD CODE.

Print what the code prints; `refused` if the password is wrong. The kernel stays.
"""

import http.cookiejar
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
import uuid

import websocket

TIMEOUT_S = 60


def main(url: str, password: str, code: str) -> None:
    """Log in, start a kernel and run the code."""
    base, jar = url.rstrip("/"), http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(jar))
    opener.open(f"{base}/login", timeout=TIMEOUT_S).read()
    xsrf = next(cookie.value or "" for cookie in jar if cookie.name == "_xsrf")
    form = urllib.parse.urlencode({"password": password, "_xsrf": xsrf}).encode()
    try:
        opener.open(f"{base}/login", data=form, timeout=TIMEOUT_S).read()
    except urllib.error.HTTPError as why:
        print("refused" if why.code == 401 else why)
        return
    request = urllib.request.Request(
        f"{base}/api/kernels", b"{}", {"X-XSRFToken": xsrf}, method="POST"
    )
    kernel = json.load(opener.open(request, timeout=TIMEOUT_S))["id"]
    cookies = "; ".join(f"{cookie.name}={cookie.value}" for cookie in jar)
    channel = websocket.create_connection(
        f"ws://{urllib.parse.urlsplit(url).netloc}/api/kernels/{kernel}/channels",
        cookie=cookies,
        timeout=TIMEOUT_S,
    )
    print(run(channel, code), end="")


def run(channel: websocket.WebSocket, code: str) -> str:
    """Return what the code prints, or its error."""
    message_id = uuid.uuid4().hex
    header = {"msg_id": message_id, "msg_type": "execute_request", "version": "5.3"}
    content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False}
    request = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
    channel.send(json.dumps({**request, "channel": "shell", "buffers": []}))
    printed = ""
    while True:
        message = json.loads(channel.recv())
        if message.get("parent_header", {}).get("msg_id") != message_id:
            continue
        content = message["content"]
        match message["header"]["msg_type"]:
            case "stream":
                printed += content["text"]
            case "error":
                return f"{content['ename']}: {content['evalue']}\n"
            case "status" if content["execution_state"] == "idle":
                return printed


main(*sys.argv[1:])
