/* Stands in for CUDA, for two callers in one process: as libcuda.so.1 for our library, and as the
   runtime for the host code that the CuTe DSL generates, which imports its functions with an
   underscore before the name. It runs nothing. It writes every launch and memset, and the
   arguments of every tensor map, to a log: one JSON object a line. */

#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef struct {
  const char* symbol;
  uint32_t count;
  uint32_t offsets[512], sizes[512];
} Kernel;

static FILE* log_file;
static int capability, max_clusters; /* of the device */
static Kernel known[8];              /* what can be loaded */
static Kernel loaded[4096];          /* a function handle points in here */
static uint32_t num_known, num_loaded, num_maps;

/* --- for the test --- */

void stand_in_log(const char* path) {
  if (log_file != NULL) fclose(log_file);
  log_file = fopen(path, "w");
  num_maps = 0;
}

void stand_in_flush(void) { fflush(log_file); }

/* From now on: a device of capability 10 major + minor, with no kernels. */
void stand_in_device(int capability_, int max_clusters_) {
  capability = capability_;
  max_clusters = max_clusters_;
  num_known = 0;
}

/* A kernel that the device's modules hold. */
void stand_in_kernel(const char* symbol, uint32_t count, const uint32_t* offsets,
                     const uint32_t* sizes) {
  Kernel* kernel = &known[num_known++];
  kernel->symbol = strdup(symbol);
  kernel->count = count;
  memcpy(kernel->offsets, offsets, count * sizeof(*offsets));
  memcpy(kernel->sizes, sizes, count * sizeof(*sizes));
}

/* --- for both callers --- */

static int Load(void** function, const char* symbol) {
  for (uint32_t i = 0; i < num_known; ++i) {
    if (strcmp(known[i].symbol, symbol) == 0) {
      loaded[num_loaded] = known[i];
      *function = &loaded[num_loaded++];
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_NOT_FOUND;
}

#define LOG(...) fprintf(log_file, __VA_ARGS__)

/* As list items: all but the first after a comma. */
static void LogList(const char* name, const void* values, uint32_t value_bytes, uint32_t count) {
  LOG(", \"%s\": [", name);
  for (uint32_t i = 0; i < count; ++i) {
    uint64_t value = 0; /* little-endian */
    memcpy(&value, (const char*)values + i * value_bytes, value_bytes);
    LOG("%s%llu", i == 0 ? "" : ", ", (unsigned long long)value);
  }
  LOG("]");
}

static int Launch(const Kernel* kernel, const unsigned* grid, const unsigned* block,
                  uint64_t shared_bytes, const void* stream, const CUlaunchAttribute* attributes,
                  unsigned num_attributes, void** parameters) {
  const unsigned* cluster = (const unsigned[]){1, 1, 1};
  LOG("{\"symbol\": \"%s\", \"shared_bytes\": %llu, \"stream\": %llu", kernel->symbol,
      (unsigned long long)shared_bytes, (unsigned long long)(uintptr_t)stream);
  LOG(", \"attributes\": {");
  const char* comma = "";
  for (unsigned i = 0; i < num_attributes; ++i) {
    if (attributes[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      cluster = &attributes[i].value.clusterDim.x;
    } else {
      LOG("%s\"%d\": %d", comma, attributes[i].id, attributes[i].value.cooperative);
      comma = ", ";
    }
  }
  LOG("}");
  LogList("grid", grid, sizeof(*grid), 3);
  LogList("block", block, sizeof(*block), 3);
  LogList("cluster", cluster, sizeof(*cluster), 3);
  LOG(", \"parameters\": [");
  for (uint32_t i = 0; i < kernel->count; ++i) {
    LOG("%s\"", i == 0 ? "" : ", ");
    for (uint32_t j = 0; j < kernel->sizes[i]; ++j)
      LOG("%02x", ((const unsigned char*)parameters[i])[j]);
    LOG("\"");
  }
  LOG("]}\n");
  return CUDA_SUCCESS;
}

/* --- the runtime, for the DSL's host code --- */

/* Laid out as cudaLaunchConfig_t; its attributes are the driver's. */
typedef struct {
  unsigned grid[3], block[3];
  size_t shared_bytes;
  void* stream;
  const CUlaunchAttribute* attributes;
  unsigned num_attributes;
} RuntimeConfig;

int _cudaGetDevice(int* device) { return *device = 0; }

/* Asked for the shared memory that a CTA can have, which is then allowed to the kernel. */
int _cudaDeviceGetAttribute(int* value, int attribute, int device) {
  (void)attribute, (void)device;
  *value = 232448;
  return CUDA_SUCCESS;
}

/* Asked for the static shared memory of the kernel. */
int _cuKernelGetAttribute(int* value, int attribute, const void* kernel, int device) {
  (void)attribute, (void)kernel, (void)device;
  return *value = 0;
}

int _cudaFuncSetAttribute(const void* kernel, int attribute, int value) {
  (void)kernel, (void)attribute, (void)value;
  return CUDA_SUCCESS;
}

int _cudaKernelSetAttributeForDevice(const void* kernel, int attribute, int value, int device) {
  (void)kernel, (void)attribute, (void)value, (void)device;
  return CUDA_SUCCESS;
}

int _cudaLibraryLoadData(void** library, const void* code, ...) {
  *library = (void*)code;
  return CUDA_SUCCESS;
}

int _cudaLibraryGetKernel(void** kernel, void* library, const char* symbol) {
  (void)library;
  return Load(kernel, symbol);
}

int _cudaLaunchKernelEx(const RuntimeConfig* config, const Kernel* kernel, void** parameters) {
  return Launch(kernel, config->grid, config->block, config->shared_bytes, config->stream,
                config->attributes, config->num_attributes, parameters);
}

/* --- the driver, for our library --- */

static CUresult ErrorText(CUresult result, const char** text) {
  (void)result;
  *text = "of the stand-in";
  return CUDA_SUCCESS;
}

/* Streams, contexts and devices are numbers. A context is its device's capability: the library
 * keeps kernels by context. */
static CUresult StreamGetCtx(CUstream stream, CUcontext* context) {
  (void)stream;
  *context = (CUcontext)(uintptr_t)capability;
  return CUDA_SUCCESS;
}

static CUresult StreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  (void)stream;
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

static CUresult CtxPushCurrent(CUcontext context) {
  (void)context;
  return CUDA_SUCCESS;
}

static CUresult CtxPopCurrent(CUcontext* context) {
  *context = (CUcontext)(uintptr_t)capability;
  return CUDA_SUCCESS;
}

static CUresult CtxGetId(CUcontext context, unsigned long long* id) {
  *id = (uintptr_t)context;
  return CUDA_SUCCESS;
}

static CUresult CtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}

static CUresult DeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  (void)device;
  *value =
      attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? capability / 10 : capability % 10;
  return CUDA_SUCCESS;
}

static CUresult DeviceGetName(char* name, int length, CUdevice device) {
  (void)device;
  snprintf(name, length, "stand-in");
  return CUDA_SUCCESS;
}

static CUresult ModuleLoadData(CUmodule* module, const void* image) {
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}

static CUresult ModuleUnload(CUmodule module) {
  (void)module;
  return CUDA_SUCCESS;
}

static CUresult ModuleGetFunction(CUfunction* function, CUmodule module, const char* symbol) {
  (void)module;
  return Load((void**)function, symbol);
}

static CUresult FuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* size) {
  const Kernel* kernel = (const Kernel*)function;
  if (index >= kernel->count) return CUDA_ERROR_INVALID_VALUE;
  *offset = kernel->offsets[index];
  *size = kernel->sizes[index];
  return CUDA_SUCCESS;
}

static CUresult FuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  (void)function, (void)attribute, (void)value;
  return CUDA_SUCCESS;
}

static CUresult FuncLoad(CUfunction function) {
  (void)function;
  return CUDA_SUCCESS;
}

static CUresult OccupancyMaxActiveClusters(int* clusters, CUfunction function,
                                           const CUlaunchConfig* config) {
  (void)function, (void)config;
  *clusters = max_clusters;
  return CUDA_SUCCESS;
}

/* The map itself becomes the place of its arguments among the log's maps. */
static CUresult TensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                     void* address, const cuuint64_t* dims,
                                     const cuuint64_t* strides, const cuuint32_t* box,
                                     const cuuint32_t* element_strides,
                                     CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                     CUtensorMapL2promotion l2_promotion,
                                     CUtensorMapFloatOOBfill fill) {
  memset(map, 0xee, sizeof(*map));
  memcpy(map, &num_maps, sizeof(num_maps));
  num_maps += 1;
  LOG("{\"address\": %llu, \"type\": %d, \"interleave\": %d, \"swizzle\": %d, \"l2_promotion\": "
      "%d, \"fill\": %d",
      (unsigned long long)(uintptr_t)address, type, interleave, swizzle, l2_promotion, fill);
  LogList("dims", dims, sizeof(*dims), rank);
  LogList("strides", strides, sizeof(*strides), rank - 1);
  LogList("box", box, sizeof(*box), rank);
  LogList("element_strides", element_strides, sizeof(*element_strides), rank);
  LOG("}\n");
  return CUDA_SUCCESS;
}

static CUresult MemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
  LOG("{\"memset\": %llu, \"value\": %u, \"count\": %zu, \"stream\": %llu}\n",
      (unsigned long long)address, value, count, (unsigned long long)(uintptr_t)stream);
  return CUDA_SUCCESS;
}

static CUresult LaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                               void** extra) {
  if (extra != NULL) return CUDA_ERROR_INVALID_VALUE;
  return Launch((const Kernel*)function, &config->gridDimX, &config->blockDimX,
                config->sharedMemBytes, config->hStream, config->attrs, config->numAttrs,
                parameters);
}

#undef cuGetProcAddress_v2
CUresult cuGetProcAddress_v2(const char* name, void** function, int version, cuuint64_t flags,
                             CUdriverProcAddressQueryResult* found) {
  (void)version, (void)flags, (void)found;
  static const struct {
    const char* name;
    void* function;
  } kFunctions[] = {
      {"cuGetErrorName", ErrorText},
      {"cuGetErrorString", ErrorText},
      {"cuStreamGetCtx", StreamGetCtx},
      {"cuStreamIsCapturing", StreamIsCapturing},
      {"cuCtxPushCurrent", CtxPushCurrent},
      {"cuCtxPopCurrent", CtxPopCurrent},
      {"cuCtxGetId", CtxGetId},
      {"cuCtxGetDevice", CtxGetDevice},
      {"cuDeviceGetAttribute", DeviceGetAttribute},
      {"cuDeviceGetName", DeviceGetName},
      {"cuModuleLoadData", ModuleLoadData},
      {"cuModuleUnload", ModuleUnload},
      {"cuModuleGetFunction", ModuleGetFunction},
      {"cuFuncGetParamInfo", FuncGetParamInfo},
      {"cuFuncSetAttribute", FuncSetAttribute},
      {"cuFuncLoad", FuncLoad},
      {"cuOccupancyMaxActiveClusters", OccupancyMaxActiveClusters},
      {"cuTensorMapEncodeTiled", TensorMapEncodeTiled},
      {"cuMemsetD32Async", MemsetD32Async},
      {"cuLaunchKernelEx", LaunchKernelEx},
  };
  for (size_t i = 0; i < sizeof(kFunctions) / sizeof(*kFunctions); ++i) {
    if (strcmp(kFunctions[i].name, name) == 0) {
      *function = kFunctions[i].function;
      return CUDA_SUCCESS;
    }
  }
  return CUDA_ERROR_NOT_FOUND;
}
