#include "c_api.h"

#include <string>
#include <string_view>

#include "driver.h"
#include "error.h"
#include "kernel_table.h"
#include "launch.h"

namespace jgg {
namespace {

std::string_view View(const char* text) { return text == nullptr ? "" : text; }

bool Flag(const char* name, int64_t value, const char* meaning) {
  if (value != 0 && value != 1) {
    InvalidArgument(name, " must be 0 or 1; got ", value, "; pass 1 ", meaning);
  }
  return value == 1;
}

// What calls of both kinds have.
template <typename Call>
void SetProblem(const Call& call, Problem& problem) {
  problem.d_element = ParseElement("d_dtype", View(call.d_dtype));
  problem.dynamic = Flag("dynamic", call.dynamic, "for a dynamic schedule");
  problem.overlap_margin = call.overlap_margin;
  problem.m = call.m;
  problem.n = call.n;
  problem.k = call.k;
  problem.l = call.l;
  problem.groups = call.groups;
  problem.offsets = call.offsets;
  problem.experts = call.experts;
  problem.alpha = call.alpha;
  problem.d = call.d;
  problem.scratch = call.scratch;
}

ForwardProblem ProblemOf(const jgg_call& call) {
  ForwardProblem problem;
  SetProblem(call, problem);
  problem.weights = ParseWeights(View(call.weights));
  problem.b_major = ParseMajor(View(call.b_major));
  if (call.c_dtype != nullptr) problem.c_element = ParseElement("c_dtype", call.c_dtype);
  if (call.bias_dtype != nullptr) {
    problem.bias_element = ParseElement("bias_dtype", call.bias_dtype);
  }
  problem.a = call.a;
  problem.b = call.b;
  problem.weight_addresses = call.weight_addresses;
  problem.prob = call.prob;
  problem.bias = call.bias;
  problem.c = call.c;
  return problem;
}

WgradProblem ProblemOf(const jgg_wgrad_call& call) {
  WgradProblem problem;
  SetProblem(call, problem);
  problem.accumulate = Flag("accumulate", call.accumulate, "to add to what d holds");
  problem.x = call.x;
  problem.y = call.y;
  return problem;
}

void Run(const CallKernels& kernels, const ForwardProblem& problem, CUstream stream) {
  LoadForward(kernels, problem.weights, stream);
  LaunchForward(kernels, problem, stream);
}

void Run(const CallKernels& kernels, const WgradProblem& problem, CUstream stream) {
  LoadWgrad(kernels, stream);
  LaunchWgrad(kernels, problem, stream);
}

// Null, or the text of an error.
template <typename Call>
const char* RunCall(const char* type, Kind kind, const Call* call) {
  thread_local std::string error;
  try {
    if (call == nullptr || call->struct_size != sizeof(Call)) {
      InvalidArgument(type, " must have struct_size ", sizeof(Call), "; got ",
                      call == nullptr ? 0 : call->struct_size,
                      "; use the header of the installed library");
    }
    const CallKernels kernels = FindKernels(kind, View(call->sm90), View(call->sm100));
    Run(kernels, ProblemOf(*call), reinterpret_cast<CUstream>(call->stream));
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}

}  // namespace
}  // namespace jgg

const char* jgg_build_id() { return jgg::BuildId().data(); }

int jgg_kernel_count() { return static_cast<int>(jgg::Kernels().size()); }

const char* jgg_kernel_name(int index) {
  const auto& kernels = jgg::Kernels();
  if (index < 0 || static_cast<size_t>(index) >= kernels.size()) return nullptr;
  return kernels[index].name.data();
}

const char* jgg_driver_status() { return jgg::DriverStatus(); }

const char* jgg_forward(const jgg_call* call) {
  return jgg::RunCall("jgg_call", jgg::FORWARD, call);
}

const char* jgg_wgrad(const jgg_wgrad_call* call) {
  return jgg::RunCall("jgg_wgrad_call", jgg::WGRAD, call);
}

void jgg_count_launches(int on) { jgg::CountLaunches(on != 0); }

void jgg_launch_counts(int64_t* launches, int64_t* captured) {
  const jgg::LaunchCounts counts = jgg::GetLaunchCounts();
  *launches = counts.launches;
  *captured = counts.captured;
}
