// A stand-in for libcuda.so.1, whose launches run on the model. The library under test opens it as
// it opens the driver.

#include <cuda.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "api.h"
#include "machine.h"
#include "matrix.h"
#include "tensor_map.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace model {
namespace {

struct Registered {
  std::string name, cubin;
  std::shared_ptr<const Code> code;
  std::vector<uint64_t> executed;
};

struct Device {
  int major = 9, minor = 0, max_clusters = 2;
  Options options;
  GlobalMemory memory;
  std::map<std::string, Registered> kernels;
  std::string fault, text;
  Statistics statistics;
  int context_depth = 0;
};

Device& TheDevice() {
  static Device device;
  return device;
}

// Handles are small numbers; the only context and device, and any stream.
constexpr uint64_t kContext = 1;

template <typename Handle>
Handle AsHandle(uint64_t id) {
  return reinterpret_cast<Handle>(id);
}

Registered* OfFunction(CUfunction function) { return reinterpret_cast<Registered*>(function); }

// An image is a cubin, or a fat binary, whose first entry must be one: a header, the entry's
// header, its data. Both headers say how long they are.
const void* CubinOf(const void* image) {
  constexpr uint32_t kFatBinary = 0xba55ed50;
  const auto* bytes = static_cast<const uint8_t*>(image);
  uint32_t magic, entry_header_bytes;
  uint16_t header_bytes;
  std::memcpy(&magic, bytes, sizeof(magic));
  if (magic != kFatBinary) return image;
  std::memcpy(&header_bytes, bytes + 6, sizeof(header_bytes));
  std::memcpy(&entry_header_bytes, bytes + header_bytes + 4, sizeof(entry_header_bytes));
  return bytes + header_bytes + entry_header_bytes;
}

// Modules are known by one of their kernels. A cubin has no length here: it is compared with those
// that are known.
Registered* WithCubin(const void* image) {
  image = CubinOf(image);
  for (auto& [name, kernel] : TheDevice().kernels) {
    if (std::memcmp(image, kernel.cubin.data(), kernel.cubin.size()) == 0) return &kernel;
  }
  TheDevice().fault = "launch\nthe model was given no PTX for this cubin";
  return nullptr;
}

Registered* InModule(const Registered& module, const std::string& symbol) {
  for (auto& [name, kernel] : TheDevice().kernels) {
    if (kernel.cubin == module.cubin && kernel.code->program.name == symbol) return &kernel;
  }
  return nullptr;
}

int Elements(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
      return static_cast<int>(ElementType::kFloat16);
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      return static_cast<int>(ElementType::kFloat32);
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      return static_cast<int>(ElementType::kBfloat16);
    default:
      return -1;
  }
}

// False for an attribute that is not modelled. That a launch may start before the one ahead of it
// is over means nothing here, where it never does.
bool ClusterOf(const CUlaunchAttribute* attributes, unsigned count, uint32_t* cluster) {
  cluster[0] = cluster[1] = cluster[2] = 1;
  for (const CUlaunchAttribute* a = attributes; a != attributes + count; ++a) {
    switch (a->id) {
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        cluster[0] = a->value.clusterDim.x;
        cluster[1] = a->value.clusterDim.y;
        cluster[2] = a->value.clusterDim.z;
        break;
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        if (a->value.cooperative) return false;
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
        break;
      default:
        return false;
    }
  }
  return true;
}

// False, and the device's fault is set, if it did not end well.
bool RunLaunch(Registered& kernel, const Launch& launch) {
  Device& device = TheDevice();
  try {
    Machine machine(device.memory, kernel.code, launch, device.options);
    auto keep = [&] {
      for (size_t i = 0; i < kernel.executed.size(); ++i) kernel.executed[i] += machine.executed[i];
      for (const auto& [warp, n] : machine.statistics.statements)
        device.statistics.statements[warp] += n;
      for (const auto& [key, n] : machine.statistics.counts) device.statistics.counts[key] += n;
    };
    try {
      machine.Run();
    } catch (...) {
      keep();
      throw;
    }
    keep();
    return true;
  } catch (const Fault& fault) {
    device.fault = fault.kind + "\n" + kernel.name + ": " + fault.what();
  } catch (const std::exception& error) {
    device.fault = std::string("launch\n") + kernel.name + ": " + error.what();
  }
  return false;
}

// parameters: the address of each.
bool RunWith(Registered& kernel, Launch launch, void** parameters) {
  const Program& program = kernel.code->program;
  launch.parameters.assign(program.parameter_bytes, 0xcc);
  for (size_t i = 0; i < program.parameters.size(); ++i) {
    std::memcpy(&launch.parameters[program.parameters[i].offset], parameters[i],
                program.parameters[i].size);
  }
  return RunLaunch(kernel, launch);
}

}  // namespace
}  // namespace model

using namespace model;  // NOLINT: the driver's entry points stand outside

// --- the driver ---

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

EXPORT CUresult cuGetErrorName(CUresult result, const char** text) {
  *text =
      result == CUDA_ERROR_LAUNCH_FAILED ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_INVALID_VALUE";
  return CUDA_SUCCESS;
}

EXPORT CUresult cuGetErrorString(CUresult, const char** text) {
  *text = TheDevice().fault.c_str();
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
  *context = AsHandle<CUcontext>(kContext);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamGetCtx(CUstream, CUcontext* context) {
  *context = AsHandle<CUcontext>(kContext);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext) {
  ++TheDevice().context_depth;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  if (TheDevice().context_depth == 0) return CUDA_ERROR_INVALID_CONTEXT;
  --TheDevice().context_depth;
  *context = AsHandle<CUcontext>(kContext);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetId(CUcontext, unsigned long long* id) {
  *id = kContext + TheDevice().major;  // another device: its modules are loaded anew
  return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  switch (which) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      *value = TheDevice().major;
      return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      *value = TheDevice().minor;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

EXPORT CUresult cuDeviceGetName(char* name, int length, CUdevice) {
  std::snprintf(name, length, "functional model");
  return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = reinterpret_cast<CUmodule>(WithCubin(image));
  return *module == nullptr ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

EXPORT CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* symbol) {
  *function =
      reinterpret_cast<CUfunction>(InModule(*reinterpret_cast<Registered*>(module), symbol));
  return *function == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

EXPORT CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t* offset,
                                   size_t* size) {
  const auto& parameters = OfFunction(function)->code->program.parameters;
  if (index >= parameters.size()) return CUDA_ERROR_INVALID_VALUE;
  *offset = parameters[index].offset;
  *size = parameters[index].size;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int value) {
  return kSharedBase + value <= kSharedBytes ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult cuFuncLoad(CUfunction) { return CUDA_SUCCESS; }

EXPORT CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig*) {
  *clusters = TheDevice().max_clusters;
  return CUDA_SUCCESS;
}

EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank,
                                       void* address, const cuuint64_t* dims,
                                       const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* element_strides,
                                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion l2_promotion,
                                       CUtensorMapFloatOOBfill fill) {
  // The driver's own rules; and what the model does not know, it refuses.
  bool valid = rank >= 1 && rank <= 5 && reinterpret_cast<uint64_t>(address) % 16 == 0 &&
               reinterpret_cast<uint64_t>(out) % 64 == 0 && Elements(type) >= 0 &&
               interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
               fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  TensorMap map{};
  map.address = reinterpret_cast<uint64_t>(address);
  map.rank = rank;
  map.type = static_cast<ElementType>(Elements(type));
  map.swizzle = swizzle;
  map.l2_promotion = l2_promotion;
  for (unsigned i = 0; valid && i < rank; ++i) {
    valid = dims[i] >= 1 && dims[i] <= uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256 &&
            element_strides[i] == 1;
    map.dims[i] = dims[i];
    map.box[i] = box[i];
    if (i > 0) {
      valid = valid && strides[i - 1] % 16 == 0 && strides[i - 1] < uint64_t{1} << 40;
      map.strides[i] = strides[i - 1];
    }
  }
  const uint32_t row_bytes = valid ? box[0] * (type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2) : 0;
  valid = valid && row_bytes % 16 == 0 &&
          (swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || row_bytes <= 16u << swizzle);
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  EncodeTensorMap(map, reinterpret_cast<uint8_t*>(out));
  // Whoever reads them is wrong.
  std::memset(reinterpret_cast<uint8_t*>(out) + 64, 0xee, 64);
  return CUDA_SUCCESS;
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream) {
  try {
    Allocation& allocation = TheDevice().memory.Find(address, 4 * count, "memset");
    for (size_t i = 0; i < count; ++i)
      std::memcpy(&allocation.bytes[address - allocation.base + 4 * i], &value, 4);
    std::fill_n(allocation.written.begin() + (address - allocation.base), 4 * count, 1);
  } catch (const Fault& fault) {
    TheDevice().fault = fault.kind + "\n" + fault.what();
    return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function,
                                 void** parameters, void** extra) {
  Launch launch{{config->gridDimX, config->gridDimY, config->gridDimZ},
                {config->blockDimX, config->blockDimY, config->blockDimZ},
                {},
                config->sharedMemBytes,
                {}};
  if (extra != nullptr || !ClusterOf(config->attrs, config->numAttrs, launch.cluster))
    return CUDA_ERROR_INVALID_VALUE;
  return RunWith(*OfFunction(function), launch, parameters) ? CUDA_SUCCESS
                                                            : CUDA_ERROR_LAUNCH_FAILED;
}

EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** entry_point, int, cuuint64_t,
                                    CUdriverProcAddressQueryResult*) {
  static const std::map<std::string, void*> kEntryPoints = {
#define ENTRY(name, function) {name, reinterpret_cast<void*>(function)}
      ENTRY("cuGetErrorName", cuGetErrorName),
      ENTRY("cuGetErrorString", cuGetErrorString),
      ENTRY("cuStreamGetCtx", cuStreamGetCtx),
      ENTRY("cuStreamIsCapturing", cuStreamIsCapturing),
      ENTRY("cuCtxPushCurrent", cuCtxPushCurrent_v2),
      ENTRY("cuCtxPopCurrent", cuCtxPopCurrent_v2),
      ENTRY("cuCtxGetId", cuCtxGetId),
      ENTRY("cuCtxGetDevice", cuCtxGetDevice),
      ENTRY("cuDeviceGetAttribute", cuDeviceGetAttribute),
      ENTRY("cuDeviceGetName", cuDeviceGetName),
      ENTRY("cuModuleLoadData", cuModuleLoadData),
      ENTRY("cuModuleUnload", cuModuleUnload),
      ENTRY("cuModuleGetFunction", cuModuleGetFunction),
      ENTRY("cuFuncGetParamInfo", cuFuncGetParamInfo),
      ENTRY("cuFuncSetAttribute", cuFuncSetAttribute),
      ENTRY("cuFuncLoad", cuFuncLoad),
      ENTRY("cuOccupancyMaxActiveClusters", cuOccupancyMaxActiveClusters),
      ENTRY("cuTensorMapEncodeTiled", cuTensorMapEncodeTiled),
      ENTRY("cuMemsetD32Async", cuMemsetD32Async),
      ENTRY("cuLaunchKernelEx", cuLaunchKernelEx),
#undef ENTRY
  };
  auto found = kEntryPoints.find(symbol);
  *entry_point = found == kEntryPoints.end() ? nullptr : found->second;
  return found == kEntryPoints.end() ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

// --- the runtime, as the host code that the CuTe DSL generates imports it ---
//
// With an underscore before each name; results are the driver's.

namespace {

// Laid out as cudaLaunchConfig_t; its attributes are the driver's.
struct RuntimeLaunch {
  uint32_t grid[3], block[3];
  size_t shared_bytes;
  void* stream;
  const CUlaunchAttribute* attributes;
  unsigned attribute_count;
};

}  // namespace

EXPORT int _cudaGetDevice(int* device) { return *device = 0; }

// Asked for the dynamic shared memory that a CTA can be given.
EXPORT int _cudaDeviceGetAttribute(int* value, int which, int) {
  constexpr int kMaxSharedMemoryPerBlockOptin = 97;
  *value = kSharedBytes - kSharedBase;
  return which == kMaxSharedMemoryPerBlockOptin ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Asked for the static shared memory of a kernel: there is none in what the DSL compiles.
EXPORT int _cuKernelGetAttribute(int* value, int which, const void*, int) {
  *value = 0;
  return which == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT int _cudaFuncSetAttribute(const void*, int, int) { return CUDA_SUCCESS; }
EXPORT int _cudaKernelSetAttributeForDevice(const void*, int, int, int) { return CUDA_SUCCESS; }

EXPORT int _cudaLibraryLoadData(void** library, const void* image, ...) {
  *library = WithCubin(image);
  return *library == nullptr ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}

EXPORT int _cudaLibraryGetKernel(void** kernel, void* library, const char* symbol) {
  *kernel = InModule(*static_cast<Registered*>(library), symbol);
  return *kernel == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

EXPORT int _cudaLaunchKernelEx(const RuntimeLaunch* config, void* kernel, void** parameters) {
  Launch launch{{config->grid[0], config->grid[1], config->grid[2]},
                {config->block[0], config->block[1], config->block[2]},
                {},
                static_cast<uint32_t>(config->shared_bytes),
                {}};
  if (!ClusterOf(config->attributes, config->attribute_count, launch.cluster))
    return CUDA_ERROR_INVALID_VALUE;
  return RunWith(*static_cast<Registered*>(kernel), launch, parameters) ? CUDA_SUCCESS
                                                                        : CUDA_ERROR_LAUNCH_FAILED;
}

// --- the harness ---

EXPORT void model_device(int major, int minor, int max_clusters) {
  TheDevice().major = major;
  TheDevice().minor = minor;
  TheDevice().max_clusters = max_clusters;
}

EXPORT const char* model_schedule(const char* policy, uint64_t seed, uint64_t max_statements) {
  static const std::map<std::string, Policy> kPolicies = {{"random", Policy::kRandom},
                                                          {"eager", Policy::kEager},
                                                          {"lazy", Policy::kLazy},
                                                          {"hold_loads", Policy::kHoldLoads},
                                                          {"hold_stores", Policy::kHoldStores},
                                                          {"hold_matrix", Policy::kHoldMatrix}};
  Options& options = TheDevice().options;
  options = Options();
  options.seed = seed;
  options.max_statements = max_statements;
  const std::string name = policy;
  if (name.rfind("starve", 0) == 0 && name.size() > 6) {
    options.policy = Policy::kStarve;
    options.starved_warp = std::atoi(policy + 6);
    return nullptr;
  }
  auto found = kPolicies.find(name);
  if (found == kPolicies.end()) return "no such policy";
  options.policy = found->second;
  return nullptr;
}

EXPORT const char* model_register(const char* name, const void* cubin, size_t bytes,
                                  const char* ptx) {
  Device& device = TheDevice();
  try {
    std::shared_ptr<const Code> code = Decode(ptx);
    Registered& kernel = device.kernels[name];
    kernel.name = name;
    kernel.cubin.assign(static_cast<const char*>(cubin), bytes);
    kernel.code = std::move(code);
    kernel.executed.assign(kernel.code->instructions.size(), 0);
    return nullptr;
  } catch (const std::exception& error) {
    device.text = error.what();
    return device.text.c_str();
  }
}

EXPORT const char* model_launch(const char* name, const uint32_t* dims, uint32_t shared_bytes,
                                const void* parameters, size_t parameter_bytes) {
  Launch launch{{dims[0], dims[1], dims[2]},
                {dims[3], dims[4], dims[5]},
                {dims[6], dims[7], dims[8]},
                shared_bytes,
                {}};
  const auto* bytes = static_cast<const uint8_t*>(parameters);
  launch.parameters.assign(bytes, bytes + parameter_bytes);
  return RunLaunch(TheDevice().kernels.at(name), launch) ? nullptr : model_fault();
}

EXPORT uint64_t model_alloc(const char* name, size_t bytes, size_t align, int writable) {
  return TheDevice().memory.Allocate(name, bytes, align, writable != 0);
}

EXPORT void model_free(uint64_t address) { TheDevice().memory.Free(address); }

EXPORT int model_write(uint64_t address, const void* from, size_t bytes) {
  try {
    Allocation& allocation = TheDevice().memory.Find(address, bytes, "copy");
    std::memcpy(&allocation.bytes[address - allocation.base], from, bytes);
    std::fill_n(allocation.written.begin() + (address - allocation.base), bytes, 1);
    return 0;
  } catch (const Fault&) {
    return 1;
  }
}

EXPORT int model_read(uint64_t address, void* into, uint8_t* written, size_t bytes) {
  try {
    Allocation& allocation = TheDevice().memory.Find(address, bytes, "copy");
    std::memcpy(into, &allocation.bytes[address - allocation.base], bytes);
    if (written != nullptr)
      std::memcpy(written, &allocation.written[address - allocation.base], bytes);
    return 0;
  } catch (const Fault&) {
    return 1;
  }
}

EXPORT const char* model_fault() {
  Device& device = TheDevice();
  device.text = std::move(device.fault);
  device.fault.clear();
  return device.text.c_str();
}

EXPORT size_t model_statements(const char* name) {
  return TheDevice().kernels.at(name).executed.size();
}

EXPORT void model_coverage(const char* name, int32_t* lines, uint64_t* executed) {
  const Registered& kernel = TheDevice().kernels.at(name);
  for (size_t i = 0; i < kernel.executed.size(); ++i) {
    lines[i] = kernel.code->program.statements[i].line;
    executed[i] = kernel.executed[i];
  }
}

EXPORT const char* model_statistics() {
  Device& device = TheDevice();
  std::ostringstream out;
  for (const auto& [warp, n] : device.statistics.statements)
    out << "statements of warp " << warp << "\t" << n << "\n";
  for (const auto& [key, n] : device.statistics.counts) out << key << "\t" << n << "\n";
  device.statistics = {};
  device.text = out.str();
  return device.text.c_str();
}

EXPORT void model_multiply_add(const uint16_t* a, int m, const uint16_t* b, int n, float* d,
                               int add_d) {
  MultiplyAdd(a, m, b, n, d, add_d != 0);
}
