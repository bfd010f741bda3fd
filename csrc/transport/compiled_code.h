// For which devices this library's kernels were compiled. Capabilities are numbers like 90 for 9.0.
#pragma once

#include <cuda_runtime_api.h>

namespace moe_ep {

// Of the code that a device with this capability runs: the newest that the library was compiled for
// and the device is not too old for. 0: there is none. (If that is for an older generation, the
// library must also have it as PTX, which is not known here: launches fail where it has not.)
int code_capability(int device_capability);

// Whether what is launched on the current device can start while the kernel before it still runs.
// Older code cannot wait for that kernel: it must be launched as if it could not.
cudaError_t has_programmatic_launch(bool* has);

}  // namespace moe_ep
