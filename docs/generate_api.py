"""Writes docs/api.md from the signatures and docstrings of the public modules.

Reads the sources only: nothing is imported, so neither a build nor torch is needed.

python docs/generate_api.py            write docs/api.md
python docs/generate_api.py --check    stop if docs/api.md differs from what would be written
"""

import inspect
import re
import sys
from itertools import takewhile
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "api.md"
MODULES = (
    "moe_ep",
    "moe_ep.integrations.transformers",
    "moe_ep.cake.kernels",
    "moe_ep.nvlink_one_sided.kernels",
    "moe_ep.nvlink_two_sided.kernels",
    "moe_ep.reference",
)
HEADER = "<!-- Written by docs/generate_api.py (make api): edit the docstrings, not this file. -->"
MAX_LINE = 96
ARGUMENT = re.compile(r"(\w+(?:, \w+)*): ")  # the house's form of a documented argument


def markdown(item):
    """An item's docstring as Markdown: paragraphs of documented arguments become lists."""
    if not item.docstring:
        return []
    paragraphs = inspect.cleandoc(item.docstring.value).split("\n\n")
    return ["\n".join(map(list_entry, p.split("\n"))) if is_list(p) else p for p in paragraphs]


def is_list(paragraph):
    """Whether every line documents an argument or continues one."""
    return all(line.startswith(" ") or ARGUMENT.match(line) for line in paragraph.split("\n"))


def list_entry(line):
    """A line of such a paragraph; a continuation keeps its indentation."""
    match = ARGUMENT.match(line)
    return f"- `{match[1]}`: {line[match.end() :]}" if match else line


def code(head, arguments, tail):
    """A code block with `head(arguments)tail` in one line, or with an argument a line."""
    text = f"{head}({', '.join(arguments)}){tail}"
    if len(text.split("\n")[-1]) > MAX_LINE:
        text = f"{head}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){tail}"
    return f"```python\n{text}\n```"


def argument(name, annotation, default):
    """An argument as it stands in a signature."""
    text = name if annotation is None else f"{name}: {annotation}"
    if default is None:
        return text
    in_field = re.match(r"field\(.*?default=([^,)]+)", str(default))
    default = in_field[1] if in_field else default
    return f"{text}={default}" if annotation is None else f"{text} = {default}"


def arguments_of(function):
    """The arguments of a function, without self and cls."""
    result = []
    star_seen = False
    for parameter in function.parameters:
        if parameter.name in ("self", "cls"):
            continue
        name, default = parameter.name, parameter.default
        if parameter.kind is griffe.ParameterKind.var_positional:
            name, default, star_seen = f"*{name}", None, True
        elif parameter.kind is griffe.ParameterKind.var_keyword:
            name, default = f"**{name}", None
        elif parameter.kind is griffe.ParameterKind.keyword_only and not star_seen:
            result.append("*")
            star_seen = True
        result.append(argument(name, parameter.annotation, default))
    return result


def function_code(function, name):
    decorator = "@classmethod\n" if "classmethod" in function.labels else ""
    tail = "" if function.returns is None else f" -> {function.returns}"
    return code(decorator + name, arguments_of(function), tail)


def class_code(cls, name):
    """How a class is constructed; where it says nothing about that, what it derives from."""
    constructor = cls.members.get("__init__")  # that of a dataclass is made up by griffe
    if constructor is not None:
        return code(name, arguments_of(constructor), "")
    return code(f"class {name}", [str(base) for base in cls.bases], "")


def members_of(cls, public):
    """The members of a class that are written with it: its own, and those that it has from classes
    that are not written themselves, up to the first that is.
    """
    unwritten = takewhile(lambda base: base.path not in public, cls.mro())
    for each in (cls, *unwritten):
        for name, member in each.members.items():
            is_own = each is cls or name not in cls.members
            if is_own and not name.startswith("_") and not member.is_alias and member.docstring:
                yield name, member


def blocks_of(item, name, depth, public, written):
    """The Markdown blocks of a class, function, property or constant.

    public: the paths of all items that modules export; written: where members stand that several
    classes have.
    """
    heading = "#" * depth
    if item.is_class:
        yield f"{heading} class `{name}`"
        yield class_code(item, name)
        yield from markdown(item)
        if "__init__" in item.members:
            yield from markdown(item.members["__init__"])
        repeated = []
        for member_name, member in members_of(item, public):
            if member.path in written:
                repeated.append(f"- `{member_name}`: as `{written[member.path]}`")
                continue
            written[member.path] = f"{name}.{member_name}"
            yield from blocks_of(member, member_name, depth + 1, public, written)
        if repeated:
            yield "\n".join(repeated)
    elif item.is_function:
        yield f"{heading} `{name}`"
        yield function_code(item, name)
        yield from markdown(item)
    else:
        yield f"{heading} `{argument(name, item.annotation, None)}`"
        yield from markdown(item)


def public_items(module):
    """What a module exports, in the order of its __all__; without one, what it defines itself."""
    if module.exports is None:
        names = [name for name, member in module.members.items() if not member.is_alias]
    else:
        names = [str(export) for export in module.exports]
    for name in names:
        item = resolved(module, module.members[name])
        if not name.startswith("_") and not item.is_module:
            yield name, item


def resolved(module, item):
    """What an exported name stands for: what it is imported from, or, where the module binds it to
    a method of an object of its own (`name = OBJECT.name`), that method.
    """
    if item.is_alias:
        return item.final_target
    bound = re.fullmatch(r"(\w+)\.(\w+)", str(item.value)) if item.is_attribute else None
    owner = module.members.get(bound[1]) if bound else None
    if owner is None or not owner.is_attribute:
        return item
    made_by = module.members[str(owner.value).partition("(")[0]]
    return made_by.final_target.members[bound[2]]


def render():
    """The text of docs/api.md."""
    package = griffe.load("moe_ep", search_paths=[ROOT], resolve_aliases=True)
    modules = {
        path: package if path == "moe_ep" else package[path.removeprefix("moe_ep.")]
        for path in MODULES
    }
    public = {item.path for module in modules.values() for _, item in public_items(module)}
    blocks = [HEADER, "# API"]
    written = {}  # where each item stands
    for path, module in modules.items():
        blocks += [f"## `{path}`", *markdown(module)]
        repeated = []
        for name, item in public_items(module):
            if item.path in written:
                repeated.append(f"- `{name}`: as `{written[item.path]}`")
                continue
            written[item.path] = f"{path}.{name}"
            blocks += blocks_of(item, name, 3, public, written)
        if repeated:
            blocks.append("\n".join(repeated))
    return "\n\n".join(blocks) + "\n"


def main():
    text = render()
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text)
        print(f"wrote {TARGET.relative_to(ROOT)}, {len(text.splitlines())} lines")
    elif not TARGET.exists() or TARGET.read_text() != text:
        sys.exit("docs/api.md is not what the docstrings say: type `make api`")
    else:
        print("docs/api.md is fresh")


if __name__ == "__main__":
    main()
