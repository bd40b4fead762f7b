#include "module_cache.h"

#include <mutex>

#include "error.h"
#include "launch_config.h"

namespace jgg {
namespace {

// Unloads a module unless it was released.
class ModuleGuard {
 public:
  ModuleGuard(const Driver& driver, CUmodule module) : driver_(driver), module_(module) {}
  ~ModuleGuard() {
    if (module_ != nullptr) driver_.cuModuleUnload_(module_);
  }
  ModuleGuard(const ModuleGuard&) = delete;
  ModuleGuard& operator=(const ModuleGuard&) = delete;
  void Release() { module_ = nullptr; }

 private:
  const Driver& driver_;
  CUmodule module_;
};

// The cubin's parameters must be those that the table packs: a mismatch is an error here, not a
// crash on the device.
void CheckParams(const Driver& driver, CUfunction function, const Where& where) {
  const Kernel& kernel = *where.kernel;
  auto mismatch = [&](const std::string& what) {
    FailedPrecondition("the kernel table does not describe its cubin: ", what, "; ",
                       where.Describe(), "; rebuild the library");
  };
  // The driver counts from the start of the constant bank's parameter area, where padding may come
  // before a first parameter that is aligned to 64 bytes (48 on SM90): offsets are compared from
  // there.
  size_t first_offset = 0;
  for (size_t i = 0; i < kernel.params.size(); ++i) {
    size_t offset = 0;
    size_t size = 0;
    CUresult result = driver.cuFuncGetParamInfo_(function, i, &offset, &size);
    if (result == CUDA_ERROR_INVALID_VALUE) {
      mismatch(Text("the cubin has ", i, " parameters, the table ", kernel.params.size()));
    }
    Check(driver, result, "cuFuncGetParamInfo", where);
    if (i == 0) first_offset = offset;
    offset -= first_offset;
    const Param& expected = kernel.params[i];
    if (offset != expected.offset || size != expected.size) {
      mismatch(Text("parameter ", i, " is at offset ", offset, " with ", size,
                    " bytes in the cubin, at ", expected.offset, " with ", expected.size,
                    " in the table"));
    }
  }
  size_t offset = 0;
  size_t size = 0;
  if (driver.cuFuncGetParamInfo_(function, kernel.params.size(), &offset, &size) == CUDA_SUCCESS) {
    mismatch(Text("the cubin has more than the table's ", kernel.params.size(), " parameters"));
  }
}

int MaxActiveClusters(const Driver& driver, CUfunction function, const Where& where) {
  const Kernel& kernel = *where.kernel;
  const LaunchConfig launch(kernel, 1, nullptr);
  int clusters = 0;
  Check(driver, driver.cuOccupancyMaxActiveClusters_(&clusters, function, &launch.config),
        "cuOccupancyMaxActiveClusters", where);
  if (clusters < 1) {
    FailedPrecondition("no cluster of ", launch.config.gridDimX, " CTAs with ", kernel.shared_bytes,
                       " bytes of shared memory fits; ", where.Describe(),
                       "; use implementation=\"reference\" on this device");
  }
  return clusters;
}

}  // namespace

const Device& ModuleCache::DeviceOf(const Driver& driver, const ContextScope& scope,
                                    const Where& where) {
  {
    std::shared_lock lock(mutex_);
    auto found = contexts_.find(scope.id());
    if (found != contexts_.end()) return found->second.device;
  }
  Device device = QueryDevice(driver, scope.id(), where);
  std::unique_lock lock(mutex_);
  return contexts_.try_emplace(scope.id(), Context{std::move(device), {}}).first->second.device;
}

const LoadedKernel& ModuleCache::Get(const Where& where) const {
  const LoadedKernel* loaded = Find(where);
  if (loaded == nullptr) {
    FailedPrecondition(
        "execute found its kernel not loaded: the initialize stage did not run on "
        "this device; ",
        where.Describe(), "; register the handler with all its stages");
  }
  return *loaded;
}

const LoadedKernel* ModuleCache::Find(const Where& where) const {
  std::shared_lock lock(mutex_);
  const auto& kernels = contexts_.at(where.device->context_id).kernels;
  auto found = kernels.find(where.kernel);
  return found == kernels.end() ? nullptr : &found->second;
}

void ModuleCache::Load(const Driver& driver, const Where& where) {
  const Kernel& kernel = *where.kernel;
  if (std::string problem = Inconsistency(kernel); !problem.empty()) {
    FailedPrecondition("the kernel table contradicts itself: ", problem, "; ", where.Describe(),
                       "; rebuild the library");
  }

  // Outside the lock: a load may wait for the device, and other devices must not wait for it.
  LoadedKernel loaded;
  CUresult result = driver.cuModuleLoadData_(&loaded.module, kernel.cubin);
  if (result != CUDA_SUCCESS) {
    throw Error(
        ErrorCode::kInternal,
        Text("cuModuleLoadData failed: ", ErrorText(driver, result), "; ", where.Describe(),
             "; cubin of ", kernel.cubin_end - kernel.cubin, " bytes for sm_", kernel.arch));
  }
  ModuleGuard guard(driver, loaded.module);
  Check(driver, driver.cuModuleGetFunction_(&loaded.function, loaded.module, kernel.symbol),
        "cuModuleGetFunction", where);
  CheckParams(driver, loaded.function, where);
  Check(driver,
        driver.cuFuncSetAttribute_(loaded.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                   static_cast<int>(kernel.shared_bytes)),
        "cuFuncSetAttribute", where);
  // With lazy loading the code would otherwise reach the device at the first launch, perhaps under
  // capture.
  Check(driver, driver.cuFuncLoad_(loaded.function), "cuFuncLoad", where);
  if (kernel.Persistent()) {
    loaded.max_clusters = MaxActiveClusters(driver, loaded.function, where);
  }

  std::unique_lock lock(mutex_);
  const bool inserted =
      contexts_.at(where.device->context_id).kernels.try_emplace(&kernel, loaded).second;
  lock.unlock();
  // Another thread may have been first: its module stays, and the guard unloads this one.
  if (inserted) guard.Release();
}

ModuleCache& Modules() {
  // Never destroyed: at exit the driver may already be gone.
  static ModuleCache* cache = new ModuleCache;
  return *cache;
}

}  // namespace jgg
