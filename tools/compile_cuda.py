"""Compiles every .cu of the project with nvcc, for each architecture that it supports.

Needs a CUDA toolkit, but neither torch nor a GPU. Objects go to build/cuda.
"""

import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from check_sources import ROOT, load_setup

FOLDERS = ("csrc", "tests/native")
JOBS = 2


def compile_one(nvcc, flags, source):
    """The compiler's exit status, its output and the seconds that it took."""
    target = ROOT / "build" / "cuda" / source.relative_to(ROOT).with_suffix(".o")
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [nvcc, *flags, "-I", ROOT / "csrc", "-c", source, "-o", target]
    started = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr, time.monotonic() - started


def main():
    setup = load_setup()
    sources = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.cu"))
    if not sources:
        print(f"no .cu file in {' or '.join(FOLDERS)}: nothing to compile")
        return
    cuda_home = setup.find_cuda_home()
    if cuda_home is None:
        sys.exit("no CUDA toolkit: CUDA_HOME can name the folder with bin/nvcc and include/cuda.h")
    flags = [*setup.NVCC_FLAGS, "-Werror=all-warnings"]
    architectures = re.findall(r"\d+", setup.CUDA_ARCHITECTURES.replace(".", ""))
    flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    print(f"{cuda_home}: sm_{', sm_'.join(architectures)}")
    nvcc = cuda_home / "bin" / "nvcc"
    failed = 0
    with ThreadPoolExecutor(JOBS) as pool:
        results = pool.map(lambda source: compile_one(nvcc, flags, source), sources)
        for source, (status, output, seconds) in zip(sources, results, strict=True):
            verdict = "FAILED" if status else "ok"
            print(f"{verdict} {source.relative_to(ROOT)} ({seconds:.0f} s)\n{output}".rstrip())
            failed += status != 0
    if failed:
        sys.exit(f"{failed} of {len(sources)} files do not compile")


if __name__ == "__main__":
    main()
