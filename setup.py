"""Builds the two extensions of moe_ep. Project metadata lives in pyproject.toml.

moe_ep._ops     the torch ops, on torch's stable ABI: loaded by torch.ops.load_library and bound to
                no Python version
moe_ep._native  the pybind11 control plane (memory objects, layout queries)

Environment: MAX_JOBS (parallel compilations, default 2), CXX, CUDA_HOME, TORCH_CUDA_ARCH_LIST.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent

# Every source by name: what is built does not depend on what happens to lie in the tree.
# tools/check_sources.py (make lint) tells when a list and its folders disagree.
OPS_SOURCES = [
    "csrc/core/process_identity.cpp",
    "csrc/one_sided/abandon.cpp",
    "csrc/one_sided/combine.cpp",
    "csrc/one_sided/dispatch.cpp",
    "csrc/one_sided/fp8_rows.cpp",
    "csrc/one_sided/initialize.cpp",
    "csrc/one_sided/shared_batch.cpp",
    "csrc/ops/combine_args.cpp",
    "csrc/ops/dispatch_args.cpp",
    "csrc/ops/errors.cpp",
    "csrc/ops/expert_ids.cpp",
    "csrc/ops/expert_picks.cpp",
    "csrc/ops/library.cpp",
    "csrc/ops/missed_peers.cpp",
    "csrc/ops/one_sided_combine.cpp",
    "csrc/ops/one_sided_dispatch.cpp",
    "csrc/ops/one_sided_shared_batch.cpp",
    "csrc/ops/one_sided_views.cpp",
    "csrc/ops/one_sided_workspace.cpp",
    "csrc/ops/round_errors.cpp",
    "csrc/ops/tensor_args.cpp",
    "csrc/ops/two_sided_args.cpp",
    "csrc/ops/two_sided_combine.cpp",
    "csrc/ops/two_sided_dispatch.cpp",
    "csrc/ops/two_sided_host.cpp",
    "csrc/ops/two_sided_workspace.cpp",
    "csrc/ops/workspace_args.cpp",
    "csrc/transport/copy_row.cpp",
    "csrc/transport/reduce_rows.cpp",
    "csrc/two_sided/abandon.cpp",
    "csrc/two_sided/alltoallv.cpp",
    "csrc/two_sided/combine.cpp",
    "csrc/two_sided/initialize.cpp",
    "csrc/two_sided/prepare.cpp",
]
OPS_CUDA_SOURCES = [
    "csrc/cake/combine_bulk.cu",
    "csrc/cake/dispatch_bulk.cu",
    "csrc/cake/launch.cu",
    "csrc/one_sided/combine_direct.cu",
    "csrc/one_sided/combine_fp8.cu",
    "csrc/one_sided/combine_get.cu",
    "csrc/one_sided/combine_push.cu",
    "csrc/one_sided/combine_quantized.cu",
    "csrc/one_sided/copy_outputs.cu",
    "csrc/one_sided/cuda_launch.cu",
    "csrc/one_sided/dispatch_direct.cu",
    "csrc/one_sided/dispatch_packets.cu",
    "csrc/one_sided/dispatch_put.cu",
    "csrc/one_sided/launch.cu",
    "csrc/one_sided/look_around.cu",
    "csrc/one_sided/row_copies.cu",
    "csrc/ops/compiled_code.cpp",
    "csrc/ops/cuda_call.cpp",
    "csrc/ops/device_rounds.cpp",
    "csrc/ops/device_status.cpp",
    "csrc/ops/device_workspaces.cpp",
    "csrc/ops/one_sided_combine_cuda.cpp",
    "csrc/ops/one_sided_dispatch_cuda.cpp",
    "csrc/ops/one_sided_workspace_cuda.cpp",
    "csrc/ops/two_sided_combine_cuda.cpp",
    "csrc/ops/two_sided_dispatch_cuda.cpp",
    "csrc/ops/two_sided_workspace_cuda.cpp",
    "csrc/transport/compiled_code.cu",
    "csrc/two_sided/cuda_alltoallv.cu",
    "csrc/two_sided/cuda_combine.cu",
    "csrc/two_sided/cuda_prepare.cu",
]
NATIVE_SOURCES = [
    "csrc/bindings/errors.cpp",
    "csrc/bindings/interrupt.cpp",
    "csrc/bindings/layout.cpp",
    "csrc/bindings/memory.cpp",
    "csrc/bindings/module.cpp",
    "csrc/memory/address_range.cpp",
    "csrc/memory/available_memory.cpp",
    "csrc/memory/cuda_driver.cpp",
    "csrc/memory/cuda_memory.cpp",
    "csrc/memory/cuda_unavailable.cpp",
    "csrc/memory/fd_channel.cpp",
    "csrc/memory/file_descriptor.cpp",
    "csrc/memory/gpu_fabric.cpp",
    "csrc/memory/handle_exchange.cpp",
    "csrc/memory/host_memory.cpp",
    "csrc/memory/mapping.cpp",
    "csrc/memory/physical_allocation.cpp",
    "csrc/memory/segmented_memory.cpp",
    "csrc/memory/shareable_handle.cpp",
]
# Of those: what includes cuda.h, and what stands in for it where there is none.
NATIVE_WITH_CUDA = {"csrc/memory/cuda_driver.cpp", "csrc/memory/cuda_memory.cpp"}
NATIVE_WITHOUT_CUDA = {"csrc/memory/cuda_unavailable.cpp"}

CUDA_ARCHITECTURES = "8.0;9.0;10.0;10.3+PTX"
# -Wno-psabi: the vector types of cake never cross a function that is not inlined.
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi"]
# A product is rounded before it is added, whatever instructions the machine has: bits are promised.
ROUNDING = ["-ffp-contract=off"]
CXX_FLAGS = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-pthread", *ROUNDING, *WARNINGS]
NVCC_FLAGS = ["-std=c++20", "-O3", "-Xcompiler=-fvisibility=hidden,-Wall,-Wextra"]
# Only what torch 2.11 already had: one library then serves every later torch.
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"


def stop(message):
    """End the build with a message that says what to do."""
    sys.exit(f"\nmoe_ep cannot be built: {message}\n")


def check_compiler():
    """The compiler ($CXX or c++) must know C++20, its standard library included."""
    compiler = os.environ.setdefault("CXX", "c++").split()
    advice = "Install GCC 11 or Clang 14 or newer, or name one: CXX=/path/to/g++"
    if shutil.which(compiler[0]) is None:
        stop(f"no C++ compiler: {compiler[0]!r} is not on the PATH. {advice}")
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, "probe.cpp")
        probe.write_text("#include <bit>\n#include <concepts>\n#include <span>\nint main() {}\n")
        command = [*compiler, "-std=c++20", "-fsyntax-only", str(probe)]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        stop(f"{' '.join(compiler)} does not compile C++20. {advice}\n{result.stderr}")


def find_cuda_home():
    """The folder of the CUDA toolkit (it has bin/nvcc and include/cuda.h), or None.

    Torch goes by where `nvcc` lies, which misleads it if that is a wrapper script; nvcc knows.
    """
    candidates = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    if nvcc := shutil.which("nvcc"):
        dry_run = [nvcc, "-v", "--dryrun", "-E", "-x", "cu", os.devnull]
        said = subprocess.run(dry_run, capture_output=True, text=True).stderr
        candidates += re.findall(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
        candidates.append(Path(nvcc).resolve().parent.parent)
    candidates.append("/usr/local/cuda")
    for folder in (Path(c).resolve() for c in candidates if c):
        if (folder / "bin" / "nvcc").exists() and (folder / "include" / "cuda.h").exists():
            return folder
    return None


def why_no_cuda(torch_cuda, cuda_home):
    """None if CUDA sources can be compiled for this torch, else the reason. Asks for no GPU."""
    if torch_cuda is None:
        return "this torch has none"
    if cuda_home is None:
        return "no toolkit found (CUDA_HOME can name the folder with bin/nvcc and include/cuda.h)"
    version = [cuda_home / "bin" / "nvcc", "--version"]
    said = subprocess.run(version, capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)\.(\d+)", said)
    if release and release[1] != torch_cuda.split(".")[0]:
        return f"torch has CUDA {torch_cuda}, but {cuda_home} is {release[1]}.{release[2]}"
    return None


def extensions():
    """The extensions for the torch that is installed, and the command that builds them."""
    cuda_home = find_cuda_home()
    if cuda_home:
        os.environ["CUDA_HOME"] = str(cuda_home)  # cpp_extension looks once, when it is imported
    import torch
    from setuptools import Extension
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

    no_cuda = why_no_cuda(torch.version.cuda, cuda_home)
    print(f"moe_ep: torch {torch.__version__}, CUDA: {f'no, {no_cuda}' if no_cuda else cuda_home}")
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", CUDA_ARCHITECTURES)
    os.environ.setdefault("MAX_JOBS", "2")
    # Where pip puts ninja, also if this Python's environment is not activated.
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    # as-needed, before the libraries: those that no object uses are not asked for at import.
    # exclude-libs: a static libstdc++, which some compilers link in, must not mix with torch's.
    flags = "-Wl,--as-needed -Wl,--exclude-libs,ALL"
    os.environ["LDFLAGS"] = f"{flags} {os.environ.get('LDFLAGS', '')}"

    torch_headers = ["-isystem", os.path.join(torch.__path__[0], "include")]  # with its pybind11
    headers = sorted(str(h) for h in ROOT.glob("csrc/**/*") if h.suffix in {".h", ".cuh"})
    ops = (CppExtension if no_cuda else CUDAExtension)(
        "moe_ep._ops",
        OPS_SOURCES if no_cuda else OPS_SOURCES + OPS_CUDA_SOURCES,
        extra_compile_args={
            "cxx": [*CXX_FLAGS, STABLE_ABI, *torch_headers],
            "nvcc": [*NVCC_FLAGS, STABLE_ABI, *torch_headers],
        },
        include_dirs=[str(ROOT / "csrc")],
        depends=headers,
        py_limited_api=True,
    )
    if not no_cuda:
        # Not torch's: an own one lets the library load where torch has another, or none.
        shared = [library for library in ops.libraries if library != "cudart"]
        ops.libraries = [*shared, "cudart_static", "rt", "dl"]
    left_out = NATIVE_WITH_CUDA if no_cuda else NATIVE_WITHOUT_CUDA
    cuda_headers = [] if no_cuda else ["-isystem", str(cuda_home / "include")]
    native = Extension(
        "moe_ep._native",
        [source for source in NATIVE_SOURCES if source not in left_out],
        extra_compile_args=[*CXX_FLAGS, *torch_headers, *cuda_headers],
        include_dirs=[str(ROOT / "csrc")],
        libraries=["dl"],  # part of the C library since glibc 2.34
        depends=headers,
        language="c++",
    )
    return [ops, native], BuildExtension


def check_environment():
    """What pyproject.toml asks for, checked here: pip does not when it does not isolate builds."""
    if not sys.platform.startswith("linux"):
        stop(f"it runs on Linux only (memfd, futex), and this is {sys.platform}.")
    if sys.version_info < (3, 10):  # noqa: UP036 (pip runs this file before it looks)
        stop(f"Python 3.10 or newer is needed, and {sys.executable} is {sys.version.split()[0]}.")
    try:
        import torch
    except ImportError:
        stop(
            "torch is not importable here. The extensions are compiled against the torch that\n"
            "they will run with, so pip must not isolate the build. Install torch >= 2.11, then\n"
            "type:\n\n    pip install --no-build-isolation .\n"
        )
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        stop(f"torch 2.11 or newer is needed, and {torch.__version__} is installed.")
    import setuptools

    if int(setuptools.__version__.split(".")[0]) < 77:
        stop(
            f"setuptools {setuptools.__version__} is too old. Type\n\n"
            f"    {sys.executable} -m pip install 'setuptools>=77.0.3'\n"
        )


def main():
    """What pip and `python setup.py` run."""
    check_environment()
    check_compiler()
    from setuptools import setup

    ext_modules, build_ext = extensions()
    setup(ext_modules=ext_modules, cmdclass={"build_ext": build_ext})


if __name__ == "__main__":
    main()
