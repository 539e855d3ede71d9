"""OCI image layouts with the same bytes each time: sorted names, fixed times and owners.

A layer's bytes depend on the files alone, so that a new release shares the layers that did not change.
"""

import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Final, cast

MADE: Final = 315532800
"""The time of all files, 1980's first second: the earliest that a zip archive can hold."""
INDEX: Final = "application/vnd.oci.image.index.v1+json"
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
CONFIG: Final = "application/vnd.oci.image.config.v1+json"
LAYER: Final = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass(frozen=True)
class Blob:
    """Content of a layout: a file, named by its digest."""

    file: Path
    media_type: str
    diff_id: str = ""
    """Of a layer: the digest of the archive before its compression."""

    @property
    def digest(self) -> str:
        """Return the digest, which is the file's name."""
        return f"sha256:{self.file.name}"

    def descriptor(self, **more: Any) -> dict[str, Any]:
        """Return what refers to this blob."""
        size = self.file.stat().st_size
        return {"mediaType": self.media_type, "digest": self.digest, "size": size, **more}


def write_tar(
    tree: Path, target: io.RawIOBase | gzip.GzipFile | BinaryIO, modes: Mapping[str, int]
) -> None:
    """Write an archive of a folder's content: sorted, owned by root.

    Args:
        tree: the folder.
        target: receives the bytes.
        modes: permissions of paths below the folder that are not 0755 or 0644.
    """
    with tarfile.open(
        fileobj=cast("IO[bytes]", target), mode="w", format=tarfile.GNU_FORMAT
    ) as tar:
        for path in sorted(tree.rglob("*"), key=lambda path: path.relative_to(tree).parts):
            name = str(path.relative_to(tree))
            entry = tarfile.TarInfo(name)
            entry.mtime = MADE
            if path.is_symlink():
                entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
                tar.addfile(entry)
            elif path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, modes.get(name, 0o755)
                tar.addfile(entry)
            else:
                status = path.stat()
                # The umask of whoever builds must not show.
                entry.mode = modes.get(name, 0o755 if status.st_mode & 0o100 else 0o644)
                entry.size = status.st_size
                with path.open("rb") as content:
                    tar.addfile(entry, content)


def make_layer(tree: Path, blobs: Path, modes: Mapping[str, int] | None = None) -> Blob:
    """Write a layer with a folder's content into the folder of blobs, and return it."""
    blobs.mkdir(parents=True, exist_ok=True)
    partial = blobs / "layer.partial"
    unpacked, packed = hashlib.sha256(), hashlib.sha256()
    with (
        partial.open("wb") as file,
        _Digest(file, packed) as compressed,
        gzip.GzipFile("", "wb", 6, compressed, MADE) as archive,
        _Digest(archive, unpacked) as plain,
    ):
        write_tar(tree, plain, modes or {})
    target = blobs / packed.hexdigest()
    partial.rename(target)
    return Blob(target, LAYER, f"sha256:{unpacked.hexdigest()}")


class _Digest(io.RawIOBase):
    """A file that hashes what is written to another."""

    def __init__(self, target: Any, digest: Any) -> None:
        super().__init__()
        self._target = target
        self._digest = digest
        self._written = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._written

    def write(self, data: Any) -> int:
        self._digest.update(data)
        self._target.write(data)
        self._written += len(data)
        return len(data)


def write_json(blobs: Path, media_type: str, document: Mapping[str, Any]) -> Blob:
    """Write a document as a blob."""
    content = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    target = blobs / hashlib.sha256(content).hexdigest()
    target.write_bytes(content)
    return Blob(target, media_type)


def write_image(
    blobs: Path, platform: Mapping[str, str], layers: Sequence[Blob], config: Mapping[str, Any]
) -> Blob:
    """Write the configuration and the manifest of one processor's image, and return the manifest.

    Args:
        blobs: their folder.
        platform: the processor and the system, by the names of OCI.
        layers: from the lowest one on.
        config: further fields of the configuration: `created`, `config`.
    """
    root = {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]}
    configuration = write_json(blobs, CONFIG, {**platform, **config, "rootfs": root})
    for layer in layers:
        if layer.file.parent != blobs:
            shutil.copyfile(layer.file, blobs / layer.file.name)
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": configuration.descriptor(),
        "layers": [layer.descriptor() for layer in layers],
    }
    return write_json(blobs, MANIFEST, manifest)


def write_index(
    blobs: Path, images: Sequence[tuple[Mapping[str, str], Blob]], annotations: Mapping[str, str]
) -> Blob:
    """Write the index of the images of several processors.

    Args:
        blobs: their folder.
        images: platforms with their manifests.
        annotations: of the index.
    """
    manifests = [manifest.descriptor(platform=dict(platform)) for platform, manifest in images]
    document = {"schemaVersion": 2, "mediaType": INDEX, "manifests": manifests}
    return write_json(blobs, INDEX, {**document, "annotations": dict(annotations)})


def pack_layout(layout: Path, top: Blob, names: Mapping[str, str], target: Path) -> None:
    """Complete a layout whose blobs are in blobs/sha256, and write it as an archive.

    Args:
        layout: its folder.
        top: the index or manifest that it contains.
        names: annotations that tell programs how to call the image.
        target: the archive.
    """
    (layout / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    index = {
        "schemaVersion": 2,
        "mediaType": INDEX,
        "manifests": [top.descriptor(annotations=dict(names))],
    }
    (layout / "index.json").write_text(json.dumps(index, sort_keys=True, separators=(",", ":")))
    partial = target.with_suffix(".partial")
    with partial.open("wb") as file:
        write_tar(layout, file, {})
    partial.rename(target)
