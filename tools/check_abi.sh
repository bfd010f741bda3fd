#!/usr/bin/env bash
# Runs the op library that was built for one torch under another one: check_abi.sh PYTHON TORCH_VERSION
# Nothing is built here: the README's example and some tests of compiled graphs, whose ways differ most between
# versions of torch, run with the extensions that PYTHON built in moe_ep.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "$1")
version=$2
environment=build/torch-$version

installed_in() { "$1" -c 'from importlib.metadata import version; print(version("torch"))'; }

built_with=$(installed_in "$python")
if [[ "${built_with%%+*}" == "$version" ]]; then
  echo "skipped: the library was built with torch $version itself (make check-abi ABI_TORCH=... names another)"
  exit 0
fi
if [[ ! -e $environment/complete ]]; then
  "$python" -m venv "$environment"
  if ! "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "torch==$version" numpy \
    pytest pytest-timeout hypothesis; then
    echo "skipped: pip cannot install torch $version here"
    exit 0
  fi
  touch "$environment/complete"
fi
echo "built with torch $built_with, run with torch $(installed_in "$environment/bin/python"):"
sha256sum moe_ep/_ops.abi3.so
sed -n '/^```python$/,/^```$/{/^```/d;p}' README.md > "$environment/example.py"
PYTHONPATH=$PWD "$environment/bin/python" -m torch.distributed.run --standalone --nproc-per-node=2 \
  "$environment/example.py"
"$environment/bin/python" -m pytest tests/compile/test_op_form.py -k "clones or x4"
