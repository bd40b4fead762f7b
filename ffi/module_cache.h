// Kernels loaded per CUDA context. Loading happens in an early stage of a call, never in execute.

#ifndef JGG_MODULE_CACHE_H_
#define JGG_MODULE_CACHE_H_

#include <map>
#include <shared_mutex>
#include <unordered_map>

#include "device.h"
#include "kernel_table.h"

namespace jgg {

struct LoadedKernel {
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  int max_clusters = 0;  // that the device holds at once; persistent kernels only
};

// Thread-safe. Entries live as long as the process: references stay valid.
class ModuleCache {
 public:
  const Device& DeviceOf(const Driver& driver, const ContextScope& scope, const Where& where);

  // Loads where.kernel into the current context, that of where.device. Threads may race: one module
  // stays, the others are unloaded.
  void Load(const Driver& driver, const Where& where);

  // where.kernel on where.device; null if it isn't loaded.
  const LoadedKernel* Find(const Where& where) const;

  // The same; an error if it isn't loaded.
  const LoadedKernel& Get(const Where& where) const;

 private:
  struct Context {
    Device device;
    std::unordered_map<const Kernel*, LoadedKernel> kernels;
  };

  mutable std::shared_mutex mutex_;
  std::map<uint64_t, Context> contexts_;  // by context id
};

ModuleCache& Modules();

}  // namespace jgg

#endif  // JGG_MODULE_CACHE_H_
