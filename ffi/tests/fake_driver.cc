#include "fake_driver.h"

#include <thread>

namespace jgg {
namespace {

struct FakeContext {
  uint64_t id;
  CUdevice device;
};
struct FakeDevice {
  int major, minor;
  std::string name;
};
struct FakeFunction {
  const Kernel* kernel;
  uint64_t context;
};

FakeDriver* fake = nullptr;
std::mutex mutex;
std::string failing;
CUresult failure;
thread_local std::vector<CUcontext> current;

// Handles are small numbers; context ids go on counting from one FakeDriver to the next, since the
// library's cache lives as long as the process.
uint64_t next_handle = 1;
std::map<uint64_t, FakeContext> contexts;
std::vector<FakeDevice> devices;
std::map<uint64_t, uint64_t> streams;  // -> context
std::map<uint64_t, Loaded> modules;
std::map<uint64_t, FakeFunction> functions;

template <typename Handle>
uint64_t Id(Handle handle) {
  return reinterpret_cast<uint64_t>(handle);
}

template <typename Handle>
Handle AsHandle(uint64_t id) {
  return reinterpret_cast<Handle>(id);
}

// Counts a call; whether it is to fail.
bool Enter(const char* call, CUresult* result) {
  fake->calls[call] += 1;
  *result = failure;
  return failing == call;
}

#define ENTER(name)                         \
  std::unique_lock<std::mutex> lock(mutex); \
  CUresult injected;                        \
  if (Enter(#name, &injected)) return injected

void NotUnderCapture(const char* call) {
  if (!fake->capturing.empty()) fake->illegal_under_capture.insert(call);
}

CUresult GetErrorName(CUresult, const char** text) {
  *text = "CUDA_ERROR_FAKE";
  return CUDA_SUCCESS;
}

CUresult GetErrorString(CUresult, const char** text) {
  *text = "as the test wished";
  return CUDA_SUCCESS;
}

CUresult StreamGetCtx(CUstream stream, CUcontext* context) {
  ENTER(cuStreamGetCtx);
  auto found = streams.find(Id(stream));
  if (found == streams.end()) return CUDA_ERROR_INVALID_HANDLE;
  *context = AsHandle<CUcontext>(found->second);
  return CUDA_SUCCESS;
}

CUresult StreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  ENTER(cuStreamIsCapturing);
  *status = fake->capturing.count(stream) ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                          : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}

CUresult CtxPushCurrent(CUcontext context) {
  ENTER(cuCtxPushCurrent);
  current.push_back(context);
  return CUDA_SUCCESS;
}

CUresult CtxPopCurrent(CUcontext* context) {
  ENTER(cuCtxPopCurrent);
  if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = current.back();
  current.pop_back();
  return CUDA_SUCCESS;
}

CUresult CtxGetId(CUcontext context, unsigned long long* id) {
  ENTER(cuCtxGetId);
  *id = contexts.at(Id(context)).id;
  return CUDA_SUCCESS;
}

CUresult CtxGetDevice(CUdevice* device) {
  ENTER(cuCtxGetDevice);
  if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *device = contexts.at(Id(current.back())).device;
  return CUDA_SUCCESS;
}

CUresult DeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
  ENTER(cuDeviceGetAttribute);
  const FakeDevice& found = devices.at(device);
  *value = which == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? found.major : found.minor;
  return CUDA_SUCCESS;
}

CUresult DeviceGetName(char* name, int length, CUdevice device) {
  ENTER(cuDeviceGetName);
  std::snprintf(name, length, "%s", devices.at(device).name.c_str());
  return CUDA_SUCCESS;
}

CUresult ModuleLoadData(CUmodule* module, const void* image) {
  if (fake->load_barrier > 0) {
    fake->load_barrier -= 1;
    while (fake->load_barrier > 0) std::this_thread::yield();
  }
  ENTER(cuModuleLoadData);
  NotUnderCapture("cuModuleLoadData");
  if (current.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  const uint64_t id = next_handle++;
  modules[id] = {static_cast<const char*>(image), contexts.at(Id(current.back())).id};
  fake->loads.push_back(modules[id]);
  *module = AsHandle<CUmodule>(id);
  fake->live_modules.insert(*module);
  return CUDA_SUCCESS;
}

CUresult ModuleUnload(CUmodule module) {
  ENTER(cuModuleUnload);
  return fake->live_modules.erase(module) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult ModuleGetFunction(CUfunction* function, CUmodule module, const char* symbol) {
  ENTER(cuModuleGetFunction);
  const Loaded& loaded = modules.at(Id(module));
  const Kernel* kernel = FindKernel(loaded.cubin);
  if (kernel == nullptr || std::string(kernel->symbol) != symbol) return CUDA_ERROR_NOT_FOUND;
  const uint64_t id = next_handle++;
  functions[id] = {kernel, loaded.context};
  *function = AsHandle<CUfunction>(id);
  return CUDA_SUCCESS;
}

CUresult FuncGetParamInfo(CUfunction function, size_t index, size_t* offset, size_t* size) {
  ENTER(cuFuncGetParamInfo);
  const Kernel& kernel = *functions.at(Id(function)).kernel;
  if (index >= kernel.params.size() + fake->extra_params) return CUDA_ERROR_INVALID_VALUE;
  const Param param = index < kernel.params.size() ? kernel.params[index] : Param{4000, 8};
  *offset = param.offset + fake->param_padding + (index == 1 ? fake->second_param_shift : 0);
  *size = param.size;
  return CUDA_SUCCESS;
}

CUresult FuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  ENTER(cuFuncSetAttribute);
  const Kernel& kernel = *functions.at(Id(function)).kernel;
  const bool right = attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES &&
                     value == static_cast<int>(kernel.shared_bytes);
  return right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult FuncLoad(CUfunction) {
  ENTER(cuFuncLoad);
  NotUnderCapture("cuFuncLoad");
  return CUDA_SUCCESS;
}

unsigned ClusterOf(const CUlaunchConfig& config) {
  const bool valid = config.numAttrs == 1 && config.gridDimY == 1 && config.gridDimZ == 1 &&
                     config.blockDimY == 1 && config.blockDimZ == 1 &&
                     config.attrs[0].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION &&
                     config.attrs[0].value.clusterDim.y == 1 &&
                     config.attrs[0].value.clusterDim.z == 1;
  return valid ? config.attrs[0].value.clusterDim.x : 0;
}

CUresult OccupancyMaxActiveClusters(int* clusters, CUfunction function,
                                    const CUlaunchConfig* config) {
  ENTER(cuOccupancyMaxActiveClusters);
  const Kernel& kernel = *functions.at(Id(function)).kernel;
  const unsigned cluster = ClusterOf(*config);
  if (cluster != unsigned(kernel.cluster.m * kernel.cluster.n) || config->gridDimX != cluster ||
      config->blockDimX != kernel.threads || config->sharedMemBytes != kernel.shared_bytes) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *clusters = fake->max_clusters;
  return CUDA_SUCCESS;
}

CUresult TensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                              void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                              const cuuint32_t* box, const cuuint32_t* element_strides,
                              CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                              CUtensorMapL2promotion l2_promotion, CUtensorMapFloatOOBfill fill) {
  ENTER(cuTensorMapEncodeTiled);
  // The driver's own rules.
  bool valid = Id(address) % 16 == 0 && Id(map) % 64 == 0;
  for (unsigned i = 0; i < rank; ++i) {
    valid = valid && dims[i] >= 1 && dims[i] <= uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256;
  }
  for (unsigned i = 0; i + 1 < rank; ++i) {
    valid = valid && strides[i] % 16 == 0 && strides[i] < uint64_t{1} << 40;
  }
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  const uint64_t index = fake->encoded.size();
  std::memset(map, 0xee, sizeof(*map));
  std::memcpy(map, &index, sizeof(index));
  fake->encoded.push_back({type,
                           Id(address),
                           {dims, dims + rank},
                           {strides, strides + rank - 1},
                           {box, box + rank},
                           {element_strides, element_strides + rank},
                           interleave,
                           swizzle,
                           l2_promotion,
                           fill});
  return CUDA_SUCCESS;
}

CUresult MemsetD32Async(CUdeviceptr address, unsigned value, size_t count, CUstream stream) {
  ENTER(cuMemsetD32Async);
  if (current.empty() || streams.at(Id(stream)) != Id(current.back())) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  if (address == 0 || address % 4 != 0) return CUDA_ERROR_INVALID_VALUE;
  fake->memsets.push_back({address, value, count, stream, fake->launched.size()});
  return CUDA_SUCCESS;
}

CUresult LaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                        void** extra) {
  ENTER(cuLaunchKernelEx);
  if (current.empty() || extra != nullptr) return CUDA_ERROR_INVALID_VALUE;
  const FakeFunction& launched = functions.at(Id(function));
  const uint64_t context = contexts.at(Id(current.back())).id;
  // A function belongs to the context that it was loaded in.
  if (launched.context != context || contexts.at(streams.at(Id(config->hStream))).id != context) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  const Kernel& kernel = *launched.kernel;
  std::vector<unsigned char> bytes(kernel.param_bytes, 0xcc);
  for (size_t i = 0; i < kernel.params.size(); ++i) {
    std::memcpy(&bytes[kernel.params[i].offset], parameters[i], kernel.params[i].size);
  }
  fake->launched.push_back({&kernel, context, config->hStream, config->gridDimX, config->blockDimX,
                            config->sharedMemBytes, ClusterOf(*config), std::move(bytes)});
  return CUDA_SUCCESS;
}

const Driver& Table() {
  static const Driver driver = [] {
    Driver d;
    d.cuGetErrorName_ = GetErrorName;
    d.cuGetErrorString_ = GetErrorString;
    d.cuStreamGetCtx_ = StreamGetCtx;
    d.cuStreamIsCapturing_ = StreamIsCapturing;
    d.cuCtxPushCurrent_ = CtxPushCurrent;
    d.cuCtxPopCurrent_ = CtxPopCurrent;
    d.cuCtxGetId_ = CtxGetId;
    d.cuCtxGetDevice_ = CtxGetDevice;
    d.cuDeviceGetAttribute_ = DeviceGetAttribute;
    d.cuDeviceGetName_ = DeviceGetName;
    d.cuModuleLoadData_ = ModuleLoadData;
    d.cuModuleUnload_ = ModuleUnload;
    d.cuModuleGetFunction_ = ModuleGetFunction;
    d.cuFuncGetParamInfo_ = FuncGetParamInfo;
    d.cuFuncSetAttribute_ = FuncSetAttribute;
    d.cuFuncLoad_ = FuncLoad;
    d.cuOccupancyMaxActiveClusters_ = OccupancyMaxActiveClusters;
    d.cuTensorMapEncodeTiled_ = TensorMapEncodeTiled;
    d.cuMemsetD32Async_ = MemsetD32Async;
    d.cuLaunchKernelEx_ = LaunchKernelEx;
    return d;
  }();
  return driver;
}

}  // namespace

FakeDriver::FakeDriver() {
  fake = this;
  failing.clear();
  contexts.clear();
  devices.clear();
  streams.clear();
  SetDriverForTesting(&Table());
}

FakeDriver::~FakeDriver() {
  SetDriverForTesting(nullptr);
  fake = nullptr;
}

CUstream FakeDriver::AddDevice(int major, int minor, const char* name) {
  const uint64_t context = next_handle++;
  contexts[context] = {context, static_cast<CUdevice>(devices.size())};
  devices.push_back({major, minor, name});
  const uint64_t stream = next_handle++;
  streams[stream] = context;
  return AsHandle<CUstream>(stream);
}

CUstream FakeDriver::AddStream(CUstream sibling) {
  const uint64_t stream = next_handle++;
  streams[stream] = streams.at(Id(sibling));
  return AsHandle<CUstream>(stream);
}

uint64_t FakeDriver::ContextOf(CUstream stream) const {
  return contexts.at(streams.at(Id(stream))).id;
}

const EncodedMap& FakeDriver::MapIn(const Launched& launch, Field field) const {
  return encoded.at(launch.Value<uint64_t>(field));
}

void FakeDriver::FailAt(const std::string& call, CUresult result) {
  failing = call;
  failure = result;
}

size_t ContextDepth() { return current.size(); }

}  // namespace jgg
