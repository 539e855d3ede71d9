"""Finds out which commit a repository's branch is at, how to clone it, and which credentials its URL has."""

import os
import re
import subprocess
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit, urlunsplit

from fenka.core.request import InvalidRequest
from fenka.jobs.training import TrainingSpec

GIT_USERNAME = "GIT_SYNC_USERNAME"


GIT_PASSWORD = "GIT_SYNC_PASSWORD"


GIT_CREDENTIALS = (GIT_USERNAME, GIT_PASSWORD)
"""Variables that are kept in a Secret: neither pods nor annotations show them."""


_TIMEOUT_S = 15.0


_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


CLONE = """\
set -eu
git() { command git -c safe.directory='*' -c credential.helper="$HELPER" "$@"; }
git init -q "$DIRECTORY"
cd "$DIRECTORY"
git remote add origin "$SOURCE"
if git fetch -q --depth 1 origin "$REVISION" || git fetch -q origin "$REVISION"; then
    git checkout -q --detach FETCH_HEAD
else
    git fetch -q --tags origin '+refs/heads/*:refs/remotes/origin/*'
    git checkout -q --detach "$REVISION"
fi
if [ -f .gitmodules ]; then git submodule -q update --init --recursive; fi
git rev-parse HEAD
"""
"""Some servers have no shallow fetch, others give no commit by its name: then everything is fetched."""


_HELPER = """\
!f() {
    test "$1" = get || return 0
    while IFS= read -r line; do
        case "$line" in
            protocol=*) protocol="${line#protocol=}" ;;
            host=*) host="${line#host=}" ;;
        esac
    done
    test "$protocol://$host" = "$ORIGIN" || return 0
    printf 'username=%s\\npassword=%s\\n' "$GIT_SYNC_USERNAME" "$GIT_SYNC_PASSWORD"
}; f"""
"""Submodules and redirects name other hosts, whose owners must not receive the source's credentials."""


_ADVICE = (
    "fatal: Could not read from remote repository.",
    "Please make sure you have the correct access rights",
    "and the repository exists.",
)
"""Git's lines after the reason why a repository cannot be read."""


def split_credentials(url: str) -> tuple[str, str, str]:
    """Return a URL without its user name and password, and these.

    A user name alone is an access token, unless it is that of an SSH account.
    """
    parts = urlsplit(url)
    token = parts.username if parts.scheme in {"http", "https"} else None
    if not (parts.password or token):
        return url, "", ""
    address = parts.netloc.rpartition("@")[2]
    bare = urlunsplit(parts._replace(netloc=address))
    return bare, unquote(parts.username or ""), unquote(parts.password or "")


def _origin(url: str) -> str:
    """Return the scheme and host of a URL, as git names them to a credential helper."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def failure_reason(output: str) -> str:
    """Return the line of git's output that says why it failed; empty if it printed none."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reasons = [line for line in lines if line not in _ADVICE]
    return next(reversed(reasons or lines), "")


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
        "ORIGIN": _origin(url),
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


def clone_variables(
    spec: TrainingSpec, directory: str, revision: str, *, credentials: bool
) -> dict[str, str]:
    """Return the environment of CLONE besides the credentials.

    Args:
        spec: The training.
        directory: The directory of the clone.
        revision: The commit; empty for that of the branch or tag that the training names.
        credentials: GIT_SYNC_USERNAME and GIT_SYNC_PASSWORD are set.
    """
    wanted = spec.env.get("GIT_SYNC_REV") or spec.env.get("GIT_SYNC_BRANCH") or "HEAD"
    return {
        "SOURCE": spec.sync_source,
        "REVISION": revision or wanted,
        "DIRECTORY": directory,
        "HELPER": _HELPER if credentials else "",
        "ORIGIN": _origin(spec.sync_source),
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }
