#include "driver.h"

#include <dlfcn.h>

#include <atomic>

#include "error.h"

namespace jgg {
namespace {

struct Opened {
  Driver driver;
  std::string failure;  // empty: opened
};

Opened Open() {
  Opened opened;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    opened.failure = Text("the NVIDIA driver library could not be opened: ", dlerror());
    return opened;
  }
  auto get_proc_address =
      reinterpret_cast<PFN_cuGetProcAddress_v12000>(dlsym(library, "cuGetProcAddress_v2"));
  if (get_proc_address == nullptr) {
    opened.failure = "the NVIDIA driver has no cuGetProcAddress_v2; driver 550 or newer is needed";
    return opened;
  }
  auto resolve = [&](const char* name, int version) {
    void* entry_point = nullptr;
    CUresult result =
        get_proc_address(name, &entry_point, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, nullptr);
    if (result != CUDA_SUCCESS || entry_point == nullptr) {
      opened.failure = Text("the NVIDIA driver has no ", name, "; driver 550 or newer is needed");
    }
    return entry_point;
  };
#define JGG_RESOLVE(name, version) \
  opened.driver.name##_ = reinterpret_cast<PFN_##name##_v##version>(resolve(#name, version));
  JGG_DRIVER_ENTRY_POINTS(JGG_RESOLVE)
#undef JGG_RESOLVE
  return opened;
}

const Opened& System() {
  static const Opened opened = Open();
  return opened;
}

std::atomic<const Driver*> stand_in{nullptr};

}  // namespace

const Driver& GetDriver() {
  if (const Driver* driver = stand_in.load(std::memory_order_acquire)) return *driver;
  if (const char* failure = DriverStatus()) {
    FailedPrecondition(failure, "; use implementation=\"reference\" to run without it");
  }
  return System().driver;
}

const char* DriverStatus() { return System().failure.empty() ? nullptr : System().failure.c_str(); }

void SetDriverForTesting(const Driver* driver) {
  stand_in.store(driver, std::memory_order_release);
}

std::string ErrorText(const Driver& driver, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver.cuGetErrorName_(result, &name);
  driver.cuGetErrorString_(result, &text);
  return Text(name ? name : "unknown CUDA error", " ", static_cast<int>(result), " (",
              text ? text : "no description", ")");
}

}  // namespace jgg
