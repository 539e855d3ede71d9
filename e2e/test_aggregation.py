"""Test the API server's aggregation layer: it forwards an API group to a Service, on behalf of the caller."""

import base64
import json
from pathlib import Path
from textwrap import dedent

from e2e.cluster import Cluster, wait_until
from e2e.configuration import FRONT_PROXY
from e2e.images import WORKLOAD
from e2e.pki import Authority
from e2e.test_harness import pod

SERVER = """
import json, ssl
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        subject = dict(pair for (pair,) in self.connection.getpeercert()["subject"])
        body = json.dumps({"caller": self.headers["X-Remote-User"], "proxy": subject["commonName"]})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile="/pki/proxy-ca.crt")
context.verify_mode = ssl.CERT_REQUIRED
context.load_cert_chain("/pki/echo.crt", "/pki/echo.key")
server = HTTPServer(("", 8443), Handler)
server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""


def objects(namespace: str, authority: Path) -> str:
    """Return a Service and the APIService that refers to it."""
    bundle = base64.b64encode((authority / "ca.crt").read_bytes()).decode()
    return dedent(
        f"""
        apiVersion: v1
        kind: Service
        metadata: {{name: echo, namespace: {namespace}}}
        spec: {{selector: {{app: echo}}, ports: [{{port: 443, targetPort: 8443}}]}}
        ---
        apiVersion: apiregistration.k8s.io/v1
        kind: APIService
        metadata: {{name: v1.echo.example}}
        spec:
          group: echo.example
          version: v1
          groupPriorityMinimum: 100
          versionPriority: 100
          caBundle: {bundle}
          service: {{name: echo, namespace: {namespace}}}
        """
    )


def test_apiserver_forwards_requests_with_the_callers_name_when_a_service_has_the_group(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    """The extension accepts only callers with a certificate of the front proxy's authority."""
    authority = Authority(tmp_path)
    authority.server("echo", [f"echo.{namespace}.svc"], [])
    proxy = cluster.state / "pki" / FRONT_PROXY / "ca.crt"
    files = [f"--from-file={tmp_path / name}" for name in ("echo.crt", "echo.key")]
    files += [f"--from-file=proxy-ca.crt={proxy}"]
    cluster.kubectl("-n", namespace, "create", "secret", "generic", "pki", *files)
    mount = {"volumeMounts": [{"name": "pki", "mountPath": "/pki"}]}
    volumes = [{"name": "pki", "secret": {"secretName": "pki"}}]
    command = ["python3", "-c", SERVER]
    server = pod("echo", WORKLOAD, cluster.nodes[0].name, command, container=mount, volumes=volumes)
    cluster.apply(server, namespace)
    cluster.wait_for_pod("echo", namespace)
    text = objects(namespace, tmp_path)
    cluster.kubectl("apply", "-f", "-", stdin=text)
    expected = {"caller": "admin", "proxy": FRONT_PROXY}

    def answers() -> bool:
        answer = json.loads(cluster.kubectl("get", "--raw", "/apis/echo.example/v1/anything"))
        assert answer == expected
        return True

    try:
        wait_until("the extension API server", answers)
    finally:
        cluster.kubectl("delete", "-f", "-", stdin=text)
