// The device of a stream, and errors that say what failed where.

#ifndef JGG_DEVICE_H_
#define JGG_DEVICE_H_

#include <cstdint>
#include <string>

#include "driver.h"
#include "kernel_table.h"

namespace jgg {

// One CUDA context and its device. A context's id is never reused; its handle may be.
struct Device {
  uint64_t context_id = 0;
  CUdevice ordinal = 0;
  std::string name;
  int capability_major = 0;
  int capability_minor = 0;

  // 90 or 100; an error for a device that no kernel is compiled for.
  int32_t Arch() const;
  std::string Describe() const;
};

// The kernel of a call for each architecture. One may be null: the call has none for that.
struct CallKernels {
  const Kernel* sm90 = nullptr;
  const Kernel* sm100 = nullptr;

  const Kernel& For(const Device& device) const;  // an error if there is none
  std::string Describe() const;
};

// What a driver error names besides the call that failed.
struct Where {
  const CallKernels& kernels;
  const Device* device = nullptr;  // null: not known yet
  const Kernel* kernel = nullptr;  // null: not chosen yet

  std::string Describe() const;
};

// Throws unless the driver call succeeded.
void Check(const Driver& driver, CUresult result, const char* call, const Where& where);

// Makes a stream's context current for the lifetime of this object.
class ContextScope {
 public:
  ContextScope(const Driver& driver, CUstream stream, const Where& where);
  ~ContextScope();
  ContextScope(const ContextScope&) = delete;
  ContextScope& operator=(const ContextScope&) = delete;

  uint64_t id() const { return id_; }

 private:
  const Driver& driver_;
  uint64_t id_ = 0;
};

// The device of the current context.
Device QueryDevice(const Driver& driver, uint64_t context_id, const Where& where);

}  // namespace jgg

#endif  // JGG_DEVICE_H_
