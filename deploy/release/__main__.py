"""`python -m deploy.release [STEP…]`: makes all artifacts of a release, or those of some steps, in dist/."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from deploy.release import deb, image, krew, manifest, packaged_chart, pages, wheels
from deploy.release.recipe import PROCESSORS, ROOT, Release, ReleaseError

Step = Callable[[Release], list[Path]]

STEPS: Final[dict[str, Step]] = {
    "pages": pages.build_pages,
    "wheels": wheels.build_wheels,
    "sdist": wheels.build_sdist,
    "image": image.build_image,
    "chart": packaged_chart.package_chart,
    "deb": deb.build_debs,
    "krew": krew.build_plugins,
    "sbom": manifest.write_sbom,
    "sums": manifest.write_checksums,
}
"""The steps in their order: each may use what earlier ones have left in `Release.into`."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options. A mistake ends the program."""
    parser = argparse.ArgumentParser(prog="python -m deploy.release", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of: {', '.join(STEPS)}")
    parser.add_argument(
        "--arch", action="append", choices=PROCESSORS, help="a processor; default: all"
    )
    parser.add_argument("--into", type=Path, default=ROOT / "dist", help="default: dist/")
    options = parser.parse_args(arguments)
    if unknown := [step for step in options.steps if step not in STEPS]:
        parser.error(f"no step is called {', '.join(unknown)}: choose of {', '.join(STEPS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps in the table's order; report an expected error as one sentence."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    release = Release(options.into.absolute(), tuple(options.arch or PROCESSORS))
    release.into.mkdir(parents=True, exist_ok=True)
    try:
        for name, step in STEPS.items():
            if options.steps and name not in options.steps:
                continue
            began = time.monotonic()
            paths = step(release)
            print(
                f"{name}: {time.monotonic() - began:.0f} s",
                *(f"  {path}" for path in paths),
                sep="\n",
            )
    except (ReleaseError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
