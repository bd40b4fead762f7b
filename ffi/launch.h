// The core that both borders share: load a call's kernels, launch a call.

#ifndef JGG_LAUNCH_H_
#define JGG_LAUNCH_H_

#include <cstdint>
#include <string_view>

#include "device.h"
#include "problem.h"

namespace jgg {

// The kernels of a call by name, which are of this kind; an error names the one that this build
// lacks. One of the names may be empty: the call has no kernel for that architecture.
CallKernels FindKernels(Kind kind, std::string_view sm90, std::string_view sm100);

// Load what a call needs on the stream's device; an error if that would be under stream capture.
void LoadForward(const CallKernels& kernels, Weights weights, CUstream stream);

void LoadWgrad(const CallKernels& kernels, CUstream stream);

// Enqueue one call. Safe under stream capture: they never load, allocate, copy or wait.
void LaunchForward(const CallKernels& kernels, const ForwardProblem& problem, CUstream stream);

void LaunchWgrad(const CallKernels& kernels, const WgradProblem& problem, CUstream stream);

// Test hook: while on, counts calls that were launched, and those launched under capture.
struct LaunchCounts {
  int64_t launches = 0;
  int64_t captured = 0;
};
void CountLaunches(bool on);  // also resets the counts
LaunchCounts GetLaunchCounts();

}  // namespace jgg

#endif  // JGG_LAUNCH_H_
