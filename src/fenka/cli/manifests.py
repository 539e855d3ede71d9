"""Prints objects of Kubernetes as `--dry-run` shows them."""

from typing import Annotated, Any, Literal

import msgspec
import typer

DryRunOutput = Literal["yaml", "json"]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="print the objects instead of creating them")
]
DryRunOutputOption = Annotated[
    DryRunOutput, typer.Option("-o", "--output", help="format of --dry-run")
]


def print_manifests(objects: list[Any], output: DryRunOutput) -> None:
    """Print objects so that `kubectl apply -f -` creates them."""
    if output == "json":
        everything = {"apiVersion": "v1", "kind": "List", "items": objects}
        print(msgspec.json.format(msgspec.json.encode(everything), indent=4).decode())
    else:
        print(_yaml(objects), end="")


def _yaml(objects: list[Any]) -> str:
    """Return documents of YAML in which texts of several lines stay readable."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Repeats values that occur twice instead of referring to them."""

        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
            return True

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, represent)
    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, explicit_start=True, width=1000)
