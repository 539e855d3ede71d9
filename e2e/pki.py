"""Create a temporary certificate authority and the certificates of the cluster's components.

They have the extensions that kubeadm gives them. Python's TLS requires these from 3.13 on.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

AUTHORITY_USAGE = "critical,digitalSignature,keyCertSign"
EXTENSIONS = """\
basicConstraints=critical,CA:FALSE
keyUsage=critical,digitalSignature
authorityKeyIdentifier=keyid
"""
"""Those of each certificate that the authority signs."""
KUBECONFIG = """\
apiVersion: v1
kind: Config
clusters:
- name: e2e
  cluster: {{server: "{server}", certificate-authority: {folder}/ca.crt}}
users:
- name: {name}
  user: {{client-certificate: {folder}/{name}.crt, client-key: {folder}/{name}.key}}
contexts:
- name: e2e
  context: {{cluster: e2e, user: {name}}}
current-context: e2e
"""


class Authority:
    """The certificates of one cluster, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "ca.crt").exists():
            self.key("ca")
            usage = f"-addext keyUsage={AUTHORITY_USAGE}"
            self.openssl(
                f"req -x509 -new -key ca.key -days 30 -subj /CN=fenka-e2e {usage} -out ca.crt"
            )

    def openssl(self, arguments: str) -> None:
        """Run openssl in the folder."""
        command = ["openssl", *arguments.split()]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True)

    def key(self, name: str) -> None:
        """Create a private key."""
        self.openssl(f"ecparam -name prime256v1 -genkey -noout -out {name}.key")

    def token_keys(self) -> None:
        """Create the key pair that signs ServiceAccount tokens."""
        self.key("tokens")
        self.openssl("ec -in tokens.key -pubout -out tokens.pub")

    def certificate(self, name: str, subject: str, extensions: str) -> None:
        """Create a key and sign a certificate for it."""
        self.key(name)
        (self.folder / f"{name}.ext").write_text(EXTENSIONS + extensions)
        self.openssl(f"req -new -key {name}.key -subj {subject} -out {name}.csr")
        signer = "-CA ca.crt -CAkey ca.key -CAcreateserial -days 30"
        self.openssl(f"x509 -req -in {name}.csr {signer} -extfile {name}.ext -out {name}.crt")

    def server(self, name: str, hosts: Sequence[str], addresses: Sequence[str]) -> None:
        """Create a serving certificate."""
        names = [f"DNS:{each}" for each in hosts] + [f"IP:{each}" for each in addresses]
        extensions = f"extendedKeyUsage=serverAuth\nsubjectAltName={','.join(names)}\n"
        self.certificate(name, f"/CN={hosts[0]}", extensions)

    def client(self, name: str, user: str, group: str | None, server: str) -> Path:
        """Create a client certificate and a kubeconfig that uses it; return the kubeconfig."""
        subject = (f"/O={group}" if group else "") + f"/CN={user}"
        self.certificate(name, subject, "extendedKeyUsage=clientAuth\n")
        kubeconfig = self.folder / f"{name}.kubeconfig"
        kubeconfig.write_text(KUBECONFIG.format(server=server, folder=self.folder, name=name))
        return kubeconfig
