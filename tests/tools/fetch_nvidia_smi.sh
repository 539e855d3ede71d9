#!/bin/sh
# fetch_nvidia_smi.sh DIRECTORY: unpacks Debian's nvidia-smi and its NVML into the directory.
#
# For tests only, and never committed: they are NVIDIA's. They come from the non-free component of the
# mirror that this machine's apt already uses, through an apt with files of its own, so that neither the
# system's package lists nor its sources change. Prints the path of nvidia-smi.
set -eu

[ $# -eq 1 ] || { echo "usage: fetch_nvidia_smi.sh DIRECTORY" >&2; exit 2; }
for tool in apt-get dpkg; do
    command -v "$tool" >/dev/null || { echo "there is no $tool here" >&2; exit 3; }
done
mkdir -p "$1"
target=$(cd "$1" && pwd)
own=$(mktemp -d)
trap 'rm -rf "$own"' EXIT
mkdir -p "$own/lists/partial" "$own/cache/archives/partial" "$own/packages" "$own/none"

. /etc/os-release
keys=/usr/share/keyrings/debian-archive-keyring.gpg
signed=
[ ! -e $keys ] || signed=" [signed-by=$keys]"
apt-get indextargets --format '$(CREATED_BY)|$(CODENAME)|$(COMPONENT)|$(REPO_URI)|$(RELEASE)' |
    awk -F'|' -v release="${VERSION_CODENAME:-none}" -v signed="$signed" '
        $1 == "Packages" && $3 == "main" && ($5 == release || $5 ~ "^" release "-(updates|security)$") {
            print "deb" signed, $4, $5, "non-free"
        }' | sort -u >"$own/sources.list"
[ -s "$own/sources.list" ] || { echo "apt knows no mirror of this release" >&2; exit 3; }

ours() {
    apt-get -qq -o Dir::Etc::SourceList="$own/sources.list" -o Dir::Etc::SourceParts="$own/none" \
        -o Dir::State::Lists="$own/lists" -o Dir::Cache="$own/cache" \
        -o APT::Sandbox::User=root "$@"
}
ours update
(cd "$own/packages" && ours download nvidia-smi libnvidia-ml1)
for package in "$own"/packages/*.deb; do
    dpkg -x "$package" "$target"
done
binary=$(find "$target" -type f -perm -u+x -name nvidia-smi | head -n 1)
[ -n "$binary" ] || { echo "the package holds no nvidia-smi" >&2; exit 3; }
echo "$binary"
