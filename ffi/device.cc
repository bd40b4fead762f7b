#include "device.h"

#include "error.h"

namespace jgg {

int32_t Device::Arch() const {
  if (capability_major == 9 && capability_minor == 0) return 90;
  if (capability_major == 10 && (capability_minor == 0 || capability_minor == 3)) return 100;
  FailedPrecondition(
      "no kernel for ", Describe(),
      ": kernels exist for compute capability 9.0 (Hopper), 10.0 and 10.3 (Blackwell); "
      "use implementation=\"reference\" on this device");
}

std::string Device::Describe() const {
  return Text("device ", ordinal, " (", name, ", compute capability ", capability_major, ".",
              capability_minor, ")");
}

const Kernel& CallKernels::For(const Device& device) const {
  const int32_t arch = device.Arch();
  const Kernel* kernel = arch == 90 ? sm90 : sm100;
  if (kernel == nullptr) {
    FailedPrecondition("the program has no kernel for ", device.Describe(),
                       ": its mma_tiler_mn or cluster_shape_mn is compiled for sm_",
                       arch == 90 ? 100 : 90, " only; leave both out, or name a tile of sm_", arch);
  }
  return *kernel;
}

std::string CallKernels::Describe() const {
  if (sm90 == nullptr) return std::string(sm100->name);
  if (sm100 == nullptr) return std::string(sm90->name);
  return Text(sm90->name, " or ", sm100->name);
}

std::string Where::Describe() const {
  return Text("kernel ", kernel ? std::string(kernel->name) : kernels.Describe(), ", ",
              device ? device->Describe() : "device of the given stream");
}

void Check(const Driver& driver, CUresult result, const char* call, const Where& where) {
  if (result == CUDA_SUCCESS) return;
  throw Error(ErrorCode::kInternal,
              Text(call, " failed: ", ErrorText(driver, result), "; ", where.Describe()));
}

ContextScope::ContextScope(const Driver& driver, CUstream stream, const Where& where)
    : driver_(driver) {
  CUcontext context = nullptr;
  Check(driver, driver.cuStreamGetCtx_(stream, &context), "cuStreamGetCtx", where);
  unsigned long long id = 0;
  Check(driver, driver.cuCtxGetId_(context, &id), "cuCtxGetId", where);
  id_ = id;
  Check(driver, driver.cuCtxPushCurrent_(context), "cuCtxPushCurrent", where);
}

ContextScope::~ContextScope() {
  // Cannot fail after the push above, and a destructor could not report it.
  CUcontext context = nullptr;
  driver_.cuCtxPopCurrent_(&context);
}

Device QueryDevice(const Driver& driver, uint64_t context_id, const Where& where) {
  Device device;
  device.context_id = context_id;
  Check(driver, driver.cuCtxGetDevice_(&device.ordinal), "cuCtxGetDevice", where);
  auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    Check(driver, driver.cuDeviceGetAttribute_(&value, which, device.ordinal),
          "cuDeviceGetAttribute", where);
    return value;
  };
  device.capability_major = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  device.capability_minor = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  char name[256] = "";
  Check(driver, driver.cuDeviceGetName_(name, sizeof(name), device.ordinal), "cuDeviceGetName",
        where);
  device.name = name;
  return device;
}

}  // namespace jgg
