"""Write go.mod for a Kubernetes version: ``python3 bump.py v1.37.1``, then `go mod tidy`.

``python3 bump.py --beside v1.33.13`` writes 1.33.mod instead, for a version that is tried beside the
cluster's own; then `go mod tidy -modfile=1.33.mod`. It has only Kubernetes: containerd is the cluster's.

Kubernetes' own go.mod replaces its parts (k8s.io/api and so on) by folders beside it. Replacements apply only
in the main module. So a module that depends on Kubernetes must name the published version of each part.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CONTAINERD = "github.com/containerd/containerd/v2"
CNI = "github.com/containernetworking/plugins"
TOOLS = (
    f"{CONTAINERD}/cmd/containerd",
    f"{CONTAINERD}/cmd/containerd-shim-runc-v2",
    f"{CONTAINERD}/cmd/ctr",
    f"{CNI}/plugins/ipam/host-local",
    f"{CNI}/plugins/main/ptp",
    f"{CNI}/plugins/meta/portmap",
)


def go(*arguments: str) -> str:
    """Return the output of a go command."""
    return subprocess.run(["go", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


def pinned(module: str) -> str:
    """Return the version in go.mod. To change it, edit go.mod before running this program."""
    match = re.search(rf"{re.escape(module)} (v\S+)", (HERE / "go.mod").read_text())
    if not match:
        raise SystemExit(f"go.mod names no version of {module}")
    return match[1]


def main() -> None:
    """Rewrite a go.mod; `go mod tidy` then updates its go.sum."""
    *beside, version = sys.argv[1:]
    major, minor_and_patch = version.removeprefix("v").split(".", 1)
    staging = f"v0.{minor_and_patch}"
    assert major == "1"
    module = json.loads(go("mod", "download", "-json", f"k8s.io/kubernetes@{version}"))
    upstream = json.loads(go("mod", "edit", "-json", module["GoMod"]))
    language = upstream["Go"]
    # A Kubernetes that names no defaults of its own was released with those of its language version.
    release = ".".join(language.split(".")[:2])
    lines = ["module fenka.io/e2e/cluster", "", f"go {language}", ""]
    lines += [f"godebug default=go{release}", ""]
    required = [f"\tk8s.io/kubernetes {version}"]
    if not beside:
        lines += ["tool (", *(f"\t{tool}" for tool in TOOLS), ")", ""]
        required += [f"\t{name} {pinned(name)}" for name in (CONTAINERD, CNI)]
    lines += ["require (", *required, ")", "", "replace ("]
    for replaced in upstream["Replace"]:
        old, new = replaced["Old"], replaced["New"]
        if new["Path"].startswith("./staging/"):
            lines.append(f"\t{old['Path']} => {old['Path']} {staging}")
    name = f"1.{minor_and_patch.split('.')[0]}.mod" if beside else "go.mod"
    (HERE / name).write_text("\n".join([*lines, ")", ""]))
    print(f"next: go mod tidy -modfile={name}; python3 ../programs.py; then run the tests")


if __name__ == "__main__":
    main()
