"""Serve a git repository to the cluster's pods, by `git daemon` in a pod."""

from collections.abc import Mapping
from textwrap import dedent

from e2e.administrator import Administrator
from e2e.images import GIT

NAME = "repository"
OBJECTS = dedent(
    f"""
    apiVersion: v1
    kind: Pod
    metadata: {{name: {NAME}, labels: {{app: {NAME}}}}}
    spec:
      terminationGracePeriodSeconds: 0
      containers:
      - name: main
        image: {GIT}
        imagePullPolicy: Never
        command: [sh, -ec, "git init -q --bare -b main /srv/project.git && exec git daemon $0 $1"]
        args: [--export-all, --base-path=/srv]
        readinessProbe: {{tcpSocket: {{port: 9418}}, periodSeconds: 1}}
    ---
    apiVersion: v1
    kind: Service
    metadata: {{name: {NAME}}}
    spec: {{selector: {{app: {NAME}}}, ports: [{{port: 9418}}]}}
    """
)
COMMIT = """
cd $(mktemp -d) && git init -q -b "$1" . && git remote add origin /srv/project.git
! git fetch -q origin "$1" 2> /dev/null || git reset -q --hard FETCH_HEAD
cat > "$2" && git add . && git commit -q -m "$2" && git push -q origin "$1" && git rev-parse HEAD
"""


class Repository:
    """A repository in a namespace; its pod ends with the namespace."""

    def __init__(self, cluster: Administrator, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        cluster.apply(OBJECTS, namespace)
        cluster.wait_for_pod(NAME, namespace)

    @property
    def url(self) -> str:
        """The address at which pods of every namespace can clone it."""
        return f"git://{NAME}.{self.namespace}/project.git"

    @property
    def public_url(self) -> str:
        """The address at which pods and clients outside of the cluster's DNS can clone it."""
        service = self.cluster.get("service", NAME, self.namespace)
        return f"git://{service['spec']['clusterIP']}/project.git"

    def commit(self, files: Mapping[str, str], branch: str = "main") -> str:
        """Commit text files one after another to a branch, and return the last commit's ID."""
        author = [
            f"GIT_{role}_{key}=e2e" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")
        ]
        inside = ("-n", self.namespace, "exec", "-i", NAME, "--", "env", *author)
        commit = ""
        for path, text in files.items():
            script = ("sh", "-ec", COMMIT, "sh", branch, path)
            commit = self.cluster.kubectl(*inside, *script, stdin=text).strip()
        return commit
