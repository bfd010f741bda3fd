#!/usr/bin/env bash
# Builds a wheel and uses it in an environment that has torch and nothing else of the project:
# check_wheel.sh PYTHON, where PYTHON has torch. Leaves the wheel in build/wheel.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "$1")
root=$PWD
environment=$root/build/wheel-environment

rm -rf build/wheel "$environment"
"$python" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/wheel .

# The packages of the first environment are visible in the new one: torch is too large to install twice.
"$python" -m venv --without-pip "$environment"
packages=$("$python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent.parent)')
target=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$packages" > "$target/torch-of-the-build.pth"
"$python" -m pip --python "$environment/bin/python" install --quiet --no-index --no-deps \
  --force-reinstall build/wheel/*.whl

cd "$environment"  # where no source tree can stand in for the package
bin/python "$root/tools/check_import.py"
sed -n '/^```python$/,/^```$/{/^```/d;p}' "$root/README.md" > example.py
bin/python example.py
