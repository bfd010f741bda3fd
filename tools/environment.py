"""Which Python environment `make` works in. Reads pyproject.toml and needs no installed package.

environment.py torch                  names the torch of this Python, if it is new enough
environment.py requirements EXTRA...  prints what a new environment needs, for pip
environment.py require EXTRA...       stops with a message if one of those is missing
"""

import sys


def stop(message):
    """End with a message that says what to do."""
    sys.exit("\nmoe_ep: " + message + "\n")


if sys.version_info < (3, 10):  # noqa: UP036 (an older Python must get as far as this message)
    stop(f"Python 3.10 or newer is needed, and {sys.executable} is {sys.version.split()[0]}")

from importlib import metadata  # noqa: E402
from pathlib import Path  # noqa: E402

PROJECT_FILE = Path(__file__).resolve().parent.parent / "pyproject.toml"


def project_table():
    """pyproject.toml as a dict."""
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        from pip._vendor import tomli as tomllib
    return tomllib.loads(PROJECT_FILE.read_text())


def requirements(extras):
    """What building, running and the named extras need, as requirement strings."""
    table = project_table()
    project = table["project"]
    wanted = list(table["build-system"]["requires"]) + list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    return wanted


def missing(wanted):
    """The requirements that this Python's packages do not meet."""
    try:
        from packaging.requirements import Requirement
    except ModuleNotFoundError:
        from pip._vendor.packaging.requirements import Requirement
    unmet = []
    for requirement in map(Requirement, wanted):
        try:
            installed = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unmet.append(str(requirement))
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            unmet.append(str(requirement))
    return unmet


def print_torch():
    """Print a name for this Python's torch, if the project can use it; print nothing otherwise."""
    wanted = [r for r in project_table()["project"]["dependencies"] if r.startswith("torch")]
    if not missing(wanted):
        python = f"cp{sys.version_info[0]}{sys.version_info[1]}"
        print(f"torch-{metadata.version('torch')}-{python}")


def require(extras):
    """Stop, with the command that helps, if something that the extras need is not there."""
    unmet = missing(requirements(extras))
    if unmet:
        names = " ".join(f"'{requirement}'" for requirement in unmet)
        stop(
            f"{sys.executable} has torch, so it is used as it is,\n"
            f"but it lacks {', '.join(unmet)}. Type\n\n"
            f"    {sys.executable} -m pip install {names}\n\n"
            "or name another Python: make PYTHON=/path/to/python3 ..."
        )


def main():
    command, *extras = sys.argv[1:]
    if command == "torch":
        print_torch()
    elif command == "requirements":
        print("\n".join(requirements(extras)))
    elif command == "require":
        require(extras)
    else:
        stop(f"environment.py knows torch, requirements and require, not {command!r}")


if __name__ == "__main__":
    main()
