"""Lists of a release's content: the bill of materials, the checksums of all files, and their signatures."""

import hashlib
import json
import os
import re
import time
import uuid
from pathlib import Path
from typing import Any, Final

from deploy.release.recipe import ROOT, Release

CHECKSUMS: Final = "SHA256SUMS"
SIGNATURES: Final = (".minisig", ".sigstore.json")
"""Endings of what signs the checksums."""

_BUNDLED: Final = re.compile(r"^(\S+) ([0-9.]+), (\S+)$", re.MULTILINE)
"""The heading of a package in the page's list of licences."""


def write_sbom(release: Release) -> list[Path]:
    """Write a CycloneDX 1.5 document: fenka's wheels, and the locked versions of all that they may install.

    What is bundled into the dashboard's page is among these, as the page's own list of licences has it.

    Raises ReleaseError.
    """
    exported = release.uv(
        *("export", "--quiet", "--frozen", "--preview-features", "sbom-export"),
        *("--no-default-groups", "--all-extras", "--format", "cyclonedx1.5"),
    )
    document: dict[str, Any] = json.loads(exported)
    fenka = document["metadata"]["component"]
    fenka |= {
        "version": release.version,
        "purl": f"pkg:pypi/fenka@{release.version}",
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "externalReferences": [
            {
                "type": "distribution",
                "url": f"{release.download_url}/{path.name}",
                "hashes": [{"alg": "SHA-256", "content": sha256(path)}],
            }
            for path in sorted(release.into.glob(f"fenka-{release.version}-py3-none-*.whl"))
        ],
    }
    licences = (ROOT / "src" / "fenka" / "_web" / "LICENSES.txt").read_text()
    document["components"] += [
        {
            "type": "library",
            "bom-ref": f"npm-{name}",
            "name": name,
            "version": version,
            "purl": f"pkg:npm/{name}@{version}",
            "licenses": [{"license": {"id": licence}}],
        }
        for name, version, licence in _BUNDLED.findall(licences)
    ]
    # Two exports of a lock differ in these alone.
    document["metadata"]["timestamp"] = time.strftime(
        "%Y-%m-%dT%H:%M:%SZ", time.gmtime(release.epoch)
    )
    document["serialNumber"] = uuid.UUID(int=0).urn
    name = json.dumps(document, sort_keys=True)
    document["serialNumber"] = uuid.uuid5(uuid.NAMESPACE_URL, name).urn
    path = release.into / f"fenka-{release.version}.cdx.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    return [path]


def write_checksums(release: Release) -> list[Path]:
    """Write SHA256SUMS of all files, and sign it with the keys that the environment names.

    FENKA_MINISIGN_KEY is the path of a secret key of minisign. FENKA_COSIGN_KEY is a key as cosign takes it:
    a path, `env://NAME` or the address of a key service. FENKA_COSIGN_CONFIG is the path of a signing
    configuration, which names the transparency log. Without a key nothing is signed. Raises ReleaseError.
    """
    sums = release.into / CHECKSUMS
    for old in (release.into / f"{CHECKSUMS}{ending}" for ending in SIGNATURES):
        old.unlink(missing_ok=True)
    files = sorted(
        path for path in release.into.rglob("*") if path.is_file() and path.name[0] != "."
    )
    lines = [
        f"{sha256(path)}  {path.relative_to(release.into)}\n" for path in files if path != sums
    ]
    sums.write_text("".join(lines))
    minisig, bundle = (sums.with_name(CHECKSUMS + ending) for ending in SIGNATURES)
    signed = []
    if key := os.environ.get("FENKA_MINISIGN_KEY"):
        comment = f"fenka {release.version}"
        release.run("minisign", "-S", "-s", key, "-t", comment, "-x", minisig, "-m", sums, data=b"")
        signed.append(minisig)
    if key := os.environ.get("FENKA_COSIGN_KEY"):
        chosen = os.environ.get("FENKA_COSIGN_CONFIG")
        config = ["--signing-config", chosen] if chosen else []
        release.run("cosign", "sign-blob", "--yes", "--key", key, *config, "--bundle", bundle, sums)
        signed.append(bundle)
    return [sums, *signed]


def sha256(path: Path) -> str:
    """Return a file's digest as hexadecimal digits."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
