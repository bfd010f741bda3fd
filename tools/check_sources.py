"""Tells whether setup.py names exactly the sources that lie in csrc."""

import sys
from importlib import util
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def load_setup():
    """setup.py as a module: its lists and helpers, without running the build."""
    spec = util.spec_from_file_location("moe_ep_setup", ROOT / "setup.py")
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources_in_tree():
    """Every compiled source below csrc, relative to the project's folder."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in {".cpp", ".cu"}
    }


def main():
    setup = load_setup()
    lists = (setup.OPS_SOURCES, setup.OPS_CUDA_SOURCES, setup.NATIVE_SOURCES)
    named = {source for sources in lists for source in sources}
    there = sources_in_tree()
    problems = [f"{source} is in no list of setup.py" for source in there - named]
    problems += [f"setup.py names {source}, which is not there" for source in named - there]
    for sources in lists:
        if sources != sorted(set(sources)):
            problems.append(f"not sorted, or a name twice: {sources}")
    if problems:
        sys.exit("\n".join(sorted(problems)))
    print(f"setup.py names all {len(named)} sources")


if __name__ == "__main__":
    main()
