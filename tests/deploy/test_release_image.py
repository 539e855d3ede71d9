"""OCI layouts and charts have the same bytes each time, and what programs look for in them."""

import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from deploy.release.layout import make_layer, pack_layout, write_image, write_index
from deploy.release.packaged_chart import package_chart
from deploy.release.recipe import Release

AMD64 = {"architecture": "amd64", "os": "linux"}
ARM64 = {"architecture": "arm64", "os": "linux", "variant": "v8"}


def make_tree(folder: Path, names: tuple[str, ...], time: float, umask: int) -> Path:
    """Write files in this order and at this time."""
    previous = os.umask(umask)
    try:
        folder.mkdir()
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
            path.chmod(0o777 & ~umask if name.startswith("bin") else 0o666 & ~umask)
            os.utime(path, (time, time))
        (folder / "link").symlink_to("/elsewhere")
    finally:
        os.umask(previous)
    return folder


def make_layout(folder: Path, tree: Path) -> Path:
    """Write the archive of an image for two processors with one layer, and return it."""
    blobs = folder / "layout" / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    layer = make_layer(tree, folder / "layers", {"tmp": 0o1777})
    images = [
        (platform, write_image(blobs, platform, [layer], {"config": {"User": "65532"}}))
        for platform in (AMD64, ARM64)
    ]
    target = folder / "image.tar"
    index = write_index(blobs, images, {"title": "x"})
    pack_layout(folder / "layout", index, {"name": "x:1"}, target)
    return target


def test_layouts_are_equal_when_only_the_build_differs(tmp_path: Path) -> None:
    """Other times, another order, another umask, another folder."""
    names = ("bin/program", "tmp/x", "etc/file")
    first = make_tree(tmp_path / "a", names, 1e9, 0o022)
    second = make_tree(tmp_path / "b", names[::-1], 1.1e9, 0o077)
    one, two = make_layout(tmp_path / "1", first), make_layout(tmp_path / "2", second)
    assert one.read_bytes() == two.read_bytes()


def test_layout_is_consistent_when_it_is_followed_from_its_index(tmp_path: Path) -> None:
    """Each digest is that of a file, each layer has the permissions and owners of an image."""
    tree = make_tree(tmp_path / "tree", ("bin/program", "tmp/x"), 1e9, 0o022)
    with tarfile.open(make_layout(tmp_path / "1", tree)) as archive:
        files = {
            entry.name: file.read()
            for entry in archive
            if (file := archive.extractfile(entry)) is not None
        }
    for name, content in files.items():
        if name.startswith("blobs/"):
            assert hashlib.sha256(content).hexdigest() == name.rpartition("/")[2]

    def follow(descriptor: dict[str, object]) -> bytes:
        content = files[f"blobs/{str(descriptor['digest']).replace(':', '/')}"]
        assert len(content) == descriptor["size"]
        return content

    (top,) = json.loads(files["index.json"])["manifests"]
    assert top["annotations"] == {"name": "x:1"}
    index = json.loads(follow(top))
    assert [manifest["platform"] for manifest in index["manifests"]] == [AMD64, ARM64]
    for manifest in index["manifests"]:
        image = json.loads(follow(manifest))
        config = json.loads(follow(image["config"]))
        assert config["architecture"] == manifest["platform"]["architecture"]
        layer = gzip.decompress(follow(image["layers"][0]))
        assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
        with tarfile.open(fileobj=io.BytesIO(layer)) as unpacked:
            entries = {entry.name: entry for entry in unpacked}
        assert {(entry.uid, entry.gid, entry.mtime) for entry in entries.values()} == {
            (0, 0, 315532800)
        }
        modes = {name: entry.mode for name, entry in entries.items()}
        assert (modes["tmp"], modes["bin/program"], modes["tmp/x"]) == (0o1777, 0o755, 0o644)


@pytest.mark.process
@pytest.mark.skipif(shutil.which("go") is None, reason="Go fetches JobSet's chart")
def test_packaged_charts_are_equal_and_contain_jobset_when_made_twice(tmp_path: Path) -> None:
    """The package has the name and the folder that helm expects."""
    packed = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        packed += package_chart(Release(tmp_path / name))
    assert packed[0].read_bytes() == packed[1].read_bytes()
    with tarfile.open(packed[0]) as archive:
        names = archive.getnames()
    assert {"fenka/Chart.yaml", "fenka/charts/jobset/Chart.yaml"} < set(names)
