"""Finds out which commit a repository's branch is at, and separates credentials from its URL."""

import os
import re
import subprocess
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit, urlunsplit

from fenka.core.request import InvalidRequest

_TIMEOUT_S = 15.0
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_HELPER = (
    '!f() { test "$1" = get && printf "username=%s\\npassword=%s\\n" '
    '"$GIT_SYNC_USERNAME" "$GIT_SYNC_PASSWORD"; }; f'
)


def split_credentials(url: str) -> tuple[str, str, str]:
    """Return a URL without its user name and password, and these."""
    parts = urlsplit(url)
    if not parts.password:
        return url, "", ""
    address = parts.netloc.rpartition("@")[2]
    bare = urlunsplit(parts._replace(netloc=address))
    return bare, unquote(parts.username or ""), unquote(parts.password)


def current_commit(url: str, branch: str, credentials: Mapping[str, str]) -> str:
    """Return the commit of a branch or tag, empty if the repository cannot be reached from here.

    Raises:
        InvalidRequest: The repository has no such branch.
    """
    helper = (
        ["-c", "credential.helper=", "-c", f"credential.helper={_HELPER}"] if credentials else []
    )
    environment = {
        **os.environ,
        **credentials,
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_SSH_COMMAND": "ssh -oBatchMode=yes -oConnectTimeout=5",
    }
    try:
        result = subprocess.run(
            ["git", *helper, "ls-remote", "--", url],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    if result.returncode:
        return ""
    lines = (line.split("\t") for line in result.stdout.decode(errors="replace").splitlines())
    commits = {line[1]: line[0] for line in lines if len(line) == 2 and _COMMIT.fullmatch(line[0])}
    # A tag with a message is an object of its own; ^{} is its commit.
    names = [f"refs/heads/{branch}", f"refs/tags/{branch}^{{}}", f"refs/tags/{branch}", branch]
    commit = next((commits[name] for name in names if name in commits), "")
    if not commit and commits:
        raise InvalidRequest(f"branch {branch} not found in {url}: check GIT_SYNC_BRANCH")
    return commit
