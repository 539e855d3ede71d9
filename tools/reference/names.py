"""The page of resources, labels and annotations, made of names.toml and held to the source."""

import ast
import re
import tomllib
from pathlib import Path

from tools.reference.markdown import ROOT, code, compare, page, parsed, sentence, table

TABLE = Path(__file__).with_name("names.toml")
_NAME = re.compile(
    r"(?:(?:fenka\.io|aliyun\.com|tencent\.com|hami\.io|nvidia\.com|gpushare\.alibabacloud\.com)/[\w.-]+"
    r"|kueue\.x-k8s\.io/podset-[\w-]+|ALIYUN_COM_GPU_MEM_\w+|scheduler\.framework\.gpushare\.\w+|ack\.node\.gpu\.\w+|cgpu\.[\w.]+"
    r"|nvidia-device-enable)(?:=.*)?"
)
"""Names of Kubernetes' objects that belong to fenka or to a system that it understands."""
SHORT = {"gpushare", "cgpu"}
"""Labels without a prefix. As words they occur everywhere."""

TITLES = {
    "request": "What pods request",
    "pod": "What people write on pods",
    "container": "What containers of a workstation request",
    "node": "What people write on nodes",
    "record": "What fenka writes on pods",
    "inventory": "What fenka writes on nodes",
    "workload": "What fenka writes on trainings, services and notebooks",
    "elastic": "What the autoscaler writes",
    "environment": "What containers find in their environment",
    "internal": "Other names",
}


def names_page() -> str:
    """Return the page. Raises MissingEntry if a name of the source has no entry, or an entry no name."""
    entries = tomllib.loads(TABLE.read_text())
    described = {name for group in entries.values() for name in group}
    compare(names_in_source(), described, TABLE)
    parts = []
    for group, title in TITLES.items():
        rows = [(code(name), sentence(text)) for name, text in entries[group].items()]
        parts += [f"## {title}", table(("name", "meaning"), rows)]
    first = (
        "Each resource, label and annotation that fenka reads or writes. "
        "A pod uses the names of one system only."
    )
    return page("Resources, labels and annotations", first, str(TABLE.relative_to(ROOT)), *parts)


def names_in_source() -> set[str]:
    """Return the names that stand in the source as whole texts."""
    found = {*SHORT}
    for nodes in parsed().values():
        for node in nodes:
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and _NAME.fullmatch(text):
                found.add(text.partition("=")[0])
    return found
