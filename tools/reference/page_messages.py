"""The messages of the dashboard as TypeScript, so that its page and its server cannot disagree.

`web/src/messages.ts` is made from the types of `fenka.views.board`.
"""

import inspect
import textwrap

import msgspec
from msgspec import inspect as shapes

from fenka.views import board

HEADER = """// Made by `make reference` from src/fenka/views/board.py.
// Times are Unix seconds, sizes MiB, shares 0 to 1. What is not known is null.
"""


def messages_module() -> str:
    """Return the module. Raises KeyError for a type that no message has."""
    structs = [
        value
        for value in vars(board).values()
        if isinstance(value, type) and issubclass(value, msgspec.Struct)
    ]
    interfaces = [_interface(struct) for struct in structs]
    return "\n".join([HEADER, f"export const MESSAGES = {board.MESSAGES};", *interfaces, ""])


def _interface(struct: type[msgspec.Struct]) -> str:
    shape = shapes.type_info(struct)
    assert isinstance(shape, shapes.StructType)
    prose = inspect.cleandoc(struct.__doc__ or "")
    lines = ["", "/**", *textwrap.indent(prose, " * ", lambda _: True).splitlines(), " */"]
    lines = [line.rstrip() for line in lines]
    lines.append(f"export interface {struct.__name__} {{")
    if shape.tag_field:
        lines.append(f'  {shape.tag_field}: "{shape.tag}";')
    lines += [f"  {field.encode_name}: {_typescript(field.type)};" for field in shape.fields]
    return "\n".join([*lines, "}"])


def _typescript(shape: shapes.Type) -> str:
    """Return the type of what JSON has for a value of this type. Raises KeyError."""
    match shape:
        case shapes.StructType():
            found = shape.cls.__name__
        case shapes.UnionType():
            found = " | ".join(_typescript(member) for member in shape.types)
        case shapes.LiteralType():
            found = " | ".join(f'"{value}"' for value in shape.values)
        case shapes.TupleType():
            found = f"[{', '.join(_typescript(item) for item in shape.item_types)}]"
        case shapes.ListType():
            found = f"Array<{_typescript(shape.item_type)}>"
        case shapes.DictType():
            found = f"Record<string, {_typescript(shape.value_type)}>"
        case _:
            found = _SCALARS[type(shape)]
    return found


_SCALARS: dict[type, str] = {
    shapes.BoolType: "boolean",
    shapes.BytesType: "string",  # in base64
    shapes.FloatType: "number",
    shapes.IntType: "number",
    shapes.NoneType: "null",
    shapes.StrType: "string",
}
