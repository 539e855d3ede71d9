"""Packages the chart together with JobSet's, with the same bytes each time.

JobSet's chart is not in this repository. It is fetched with JobSet's Go module, at the version on which the
end-to-end tests run, and go.sum proves its content. The result installs JobSet if `jobset.enabled` is set.
"""

import gzip
import json
import shutil
import tempfile
from pathlib import Path

from deploy.release.layout import MADE, write_tar
from deploy.release.recipe import ROOT, Release, ReleaseError

CHART = ROOT / "deploy" / "chart"
MODULE = ROOT / "e2e" / "jobset"
DEPENDENCY = """
# Added when the chart was packaged.
dependencies:
- name: jobset
  version: {version}
"""
ONLY_IF_ENABLED = "{{{{- if .Values.enabled }}}}\n{}\n{{{{- end }}}}\n"
ANNOTATIONS = "  annotations:\n"
CERTIFICATE = Path("templates", "internalcert", "secret.yaml")
EMPTY_CERTIFICATE = 'data:\n  ca.crt: ""\n  ca.key: ""\n  tls.crt: ""\n  tls.key: ""\n'


def jobset(release: Release) -> tuple[str, Path]:
    """Return JobSet's version, without the `v`, and the folder of its module. Raises ReleaseError."""
    if not shutil.which("go"):
        raise ReleaseError("`go` is not installed: it fetches JobSet's chart")
    output = release.run("go", "mod", "download", "-json", "sigs.k8s.io/jobset", folder=MODULE)
    module = json.loads(output)
    return module["Version"].removeprefix("v"), Path(module["Dir"])


def write_subchart(source: Path, target: Path) -> None:
    """Copy JobSet's chart so that it renders nothing unless `enabled` is set.

    A `condition` of the dependency would not do: it counts as met when an upgrade with --reuse-values has no
    such value. Files of Go's module cache are read-only, so only the content is copied.
    """
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if path.is_dir() or relative.parts[0] == "tests":
            continue
        content = path.read_text()
        if relative.parts[0] == "crds":
            relative, content = Path("templates", path.name), kept_definition(content)
        if relative == CERTIFICATE:
            content = empty_secret(content)
        if relative.parts[0] == "templates" and path.suffix == ".yaml":
            content = ONLY_IF_ENABLED.format(content)
        copy = target / relative
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(content)


def kept_definition(content: str) -> str:
    """Return the resource definition as a template.

    Helm installs the files of crds/ only with a new release, but `jobset.enabled` may be set by an upgrade.
    As with crds/, the definition and all JobSets stay when the release is uninstalled.
    """
    if "{{" in content or ANNOTATIONS not in content:
        raise ReleaseError("the resource definition in JobSet's chart has an unexpected format")
    return content.replace(ANNOTATIONS, f"{ANNOTATIONS}    helm.sh/resource-policy: keep\n", 1)


def empty_secret(content: str) -> str:
    """Return the Secret of the controller's certificate without the fields that the controller writes.

    Helm applies what changed between two upgrades, and the controller's values would be a conflict.
    """
    if EMPTY_CERTIFICATE not in content:
        raise ReleaseError("the certificate's Secret in JobSet's chart has an unexpected format")
    return content.replace(EMPTY_CERTIFICATE, "")


def write_chart(release: Release, target: Path) -> None:
    """Write the chart with JobSet's to a folder, replacing it. Raises ReleaseError."""
    version, module = jobset(release)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(CHART, target)
    write_subchart(module / "charts" / "jobset", target / "charts" / "jobset")
    (target / "charts" / "jobset" / "LICENSE").write_text((module / "LICENSE").read_text())
    with (target / "Chart.yaml").open("a") as chart:
        chart.write(DEPENDENCY.format(version=version))


def chart_path(release: Release) -> Path:
    """Return the path of the packaged chart, whose name is that of `helm package`."""
    return release.into / f"fenka-{release.version}.tgz"


def package_chart(release: Release) -> list[Path]:
    """Write the packaged chart. Raises ReleaseError."""
    target = chart_path(release)
    with tempfile.TemporaryDirectory() as folder:
        write_chart(release, Path(folder, "fenka"))
        with (
            target.open("wb") as file,
            gzip.GzipFile("", "wb", 9, file, MADE) as archive,
        ):
            write_tar(Path(folder), archive, {})
    return [target]
