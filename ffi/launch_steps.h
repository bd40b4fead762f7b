// The steps that calls of every kind share; forward.cc and wgrad.cc put them together.

#ifndef JGG_LAUNCH_STEPS_H_
#define JGG_LAUNCH_STEPS_H_

#include <cstdint>

#include "device.h"
#include "parameters.h"
#include "problem.h"

namespace jgg {

// A call on its stream: the stream's context is current for the lifetime of this object.
class StreamCall {
 public:
  // An error if the stream's device has no kernel among these.
  StreamCall(const CallKernels& kernels, CUstream stream);

  const Driver& driver() const { return driver_; }
  const Kernel& kernel() const { return *where_.kernel; }
  const Where& where() const { return where_; }

  // Loads a kernel, if it isn't; an error if that would be under stream capture.
  void Load(const Kernel& kernel) const;

  // How many clusters of the call's kernel run at once beside the SMs left to others; an error if
  // none does.
  int64_t FittingClusters(int64_t overlap_margin) const;

  // Zero at the counter's address, unless that is null: a static schedule. Part of the call, and of
  // a graph that captures it: a replay starts from zero again.
  void ResetCounter(Address counter) const;

  void Enqueue(const Kernel& kernel, int64_t clusters, const FieldValues& values) const;

  // Notes a launched call for the test hook.
  void Count() const;

 private:
  bool IsCapturing() const;

  const Driver& driver_;
  const CUstream stream_;
  Where where_;
  ContextScope scope_;
};

// --- checks: errors say what is wrong with an operand -------------------------------------------

void CheckAddress(const char* name, Address address, uint64_t alignment);

// An operand that may be missing has both a dtype and an address, or neither.
void CheckOptional(const char* name, Address address, Element element, uint64_t alignment);

// What every call has.
void CheckProblem(const Problem& problem, int64_t scratch_bytes);

// A kernel that does not fit the problem would compute something else, silently.
void CheckKernel(const Kernel& kernel, const Problem& problem);

// The error for that: the kernel does not do `what`.
[[noreturn]] void DoesNotFit(const Kernel& kernel, const char* what);

// Whether a kernel that writes the one element type serves a call of the other.
bool Writes(Element of_kernel, Element of_call);

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jgg

#endif  // JGG_LAUNCH_STEPS_H_
