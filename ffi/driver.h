// The CUDA driver's entry points, found at run time: the library loads on a machine without a GPU.

#ifndef JGG_DRIVER_H_
#define JGG_DRIVER_H_

#include <cudaTypedefs.h>

#include <string>

namespace jgg {

// (name, version): the version is the one that cuGetProcAddress takes, and fixes the signature.
#define JGG_DRIVER_ENTRY_POINTS(X)       \
  X(cuGetErrorName, 6000)                \
  X(cuGetErrorString, 6000)              \
  X(cuStreamGetCtx, 9020)                \
  X(cuStreamIsCapturing, 10000)          \
  X(cuCtxPushCurrent, 4000)              \
  X(cuCtxPopCurrent, 4000)               \
  X(cuCtxGetId, 12000)                   \
  X(cuCtxGetDevice, 2000)                \
  X(cuDeviceGetAttribute, 2000)          \
  X(cuDeviceGetName, 2000)               \
  X(cuModuleLoadData, 2000)              \
  X(cuModuleUnload, 2000)                \
  X(cuModuleGetFunction, 2000)           \
  X(cuFuncGetParamInfo, 12040)           \
  X(cuFuncSetAttribute, 9000)            \
  X(cuFuncLoad, 12040)                   \
  X(cuOccupancyMaxActiveClusters, 11070) \
  X(cuTensorMapEncodeTiled, 12000)       \
  X(cuMemsetD32Async, 3020)              \
  X(cuLaunchKernelEx, 11060)

// cuda.h renames some of these names by macros; pasting keeps them as written.
struct Driver {
#define JGG_MEMBER(name, version) PFN_##name##_v##version name##_ = nullptr;
  JGG_DRIVER_ENTRY_POINTS(JGG_MEMBER)
#undef JGG_MEMBER
};

// The driver of this process; an error with a remedy if there is none.
const Driver& GetDriver();

// Null if libcuda could be opened and has every entry point, else why not.
const char* DriverStatus();

// Makes GetDriver return a stand-in, or the real driver again if null.
void SetDriverForTesting(const Driver* driver);

// "CUDA_ERROR_INVALID_VALUE (invalid argument)".
std::string ErrorText(const Driver& driver, CUresult result);

}  // namespace jgg

#endif  // JGG_DRIVER_H_
