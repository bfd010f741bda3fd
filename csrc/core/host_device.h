// Marks a function for host and device, so that kernels, launchers and tests share one definition.
#pragma once

#if defined(__CUDACC__)
#define MOE_EP_HOST_DEVICE __host__ __device__
// What kernels run, and native tests on threads in their place.
#define MOE_EP_ON_DEVICE __device__
#else
#define MOE_EP_HOST_DEVICE
#define MOE_EP_ON_DEVICE
#endif
