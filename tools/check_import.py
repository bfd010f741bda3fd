"""Checks an installed moe_ep: what its import costs, and that the import touches no CUDA driver.

Run it with a Python that has the package installed, from a folder without the source tree.
"""

import subprocess
import sys

LIMIT_SECONDS = 0.2
ATTEMPTS = 5

PROBE = """
import time, torch

def driver_loaded():
    with open("/proc/self/maps") as maps:
        return "libcuda.so" in maps.read()

torch_loads_driver = driver_loaded()
started = time.perf_counter()
import moe_ep
seconds = time.perf_counter() - started
assert not torch.cuda.is_initialized(), "the import initialised CUDA"
assert driver_loaded() == torch_loads_driver, "the import loaded the CUDA driver"
print(seconds, moe_ep.__version__, moe_ep.__file__)
"""


def main():
    runs = []
    for _ in range(ATTEMPTS):
        result = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
        if result.returncode != 0:
            sys.exit(f"import moe_ep failed:\n{result.stderr}")
        seconds, version, place = result.stdout.split()
        runs.append(float(seconds))
    best = min(runs)  # other work on the machine only ever adds
    print(f"moe_ep {version} in {place}: import takes {best:.3f} s beyond torch's")
    if best > LIMIT_SECONDS:
        sys.exit(f"the import takes {best:.3f} s beyond torch's, more than {LIMIT_SECONDS} s")


if __name__ == "__main__":
    main()
