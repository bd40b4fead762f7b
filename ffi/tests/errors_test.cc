// Every failure says what failed, where, and what to do; and leaves nothing behind.

#include <functional>
#include <limits>

#include "c_api.h"
#include "check.h"
#include "error.h"
#include "fake_driver.h"
#include "launch.h"
#include "problems.h"

namespace jgg {
namespace {

TEST(EveryDriverCallInLoad) {
  for (const char* call :
       {"cuStreamGetCtx", "cuCtxGetId", "cuCtxPushCurrent", "cuCtxGetDevice",
        "cuDeviceGetAttribute", "cuDeviceGetName", "cuModuleLoadData", "cuModuleGetFunction",
        "cuFuncGetParamInfo", "cuFuncSetAttribute", "cuFuncLoad", "cuOccupancyMaxActiveClusters"}) {
    FakeDriver fake;
    const CUstream stream = fake.AddDevice(9, 0, "Fake H200");
    fake.FailAt(call, CUDA_ERROR_UNKNOWN);
    const std::string error =
        check::Thrown([&] { LoadForward(DenseKernels(), Weights::kDense, stream); });
    CHECK_CONTAINS(error, std::string(call) + " failed: CUDA_ERROR_FAKE 999 (as the test wished)");
    CHECK_CONTAINS(error, "kernel sm90_dense_bk_bf16_plain");
    const bool known = fake.calls.count("cuModuleLoadData") != 0;
    CHECK_CONTAINS(error, known ? "device 0 (Fake H200, compute capability 9.0)"
                                : "device of the given stream");
    CHECK(fake.live_modules.empty());
    CHECK_EQ(ContextDepth(), 0u);

    // Nothing half-done stays: the next try loads as if it were the first.
    fake.FailAt("");
    LoadForward(DenseKernels(), Weights::kDense, stream);
    LaunchForward(DenseKernels(), DenseProblem(64, 64, 64, 2), stream);
    CHECK_EQ(fake.live_modules.size(), 1u);
    CHECK_EQ(fake.launched.size(), 1u);
  }
}

TEST(LoadErrorsNameTheCubin) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  fake.FailAt("cuModuleLoadData");
  CHECK_CONTAINS(check::Thrown([&] { LoadForward(DenseKernels(), Weights::kDense, stream); }),
                 "cubin of 25 bytes for sm_90");
}

TEST(EveryDriverCallInExecute) {
  for (const char* call : {"cuStreamGetCtx", "cuCtxGetId", "cuCtxPushCurrent",
                           "cuTensorMapEncodeTiled", "cuLaunchKernelEx", "cuStreamIsCapturing"}) {
    FakeDriver fake;
    const CUstream stream = fake.AddDevice(10, 0, "Fake B200");
    LoadForward(DenseKernels(), Weights::kDense, stream);
    CountLaunches(true);
    fake.FailAt(call);
    const std::string error =
        check::Thrown([&] { LaunchForward(DenseKernels(), DenseProblem(64, 64, 64, 2), stream); });
    CHECK_CONTAINS(error, std::string(call) + " failed: CUDA_ERROR_FAKE");
    CHECK_CONTAINS(error, "sm100_dense_bk_bf16_plain");
    CHECK_CONTAINS(error, "device ");
    CHECK_EQ(ContextDepth(), 0u);
    CountLaunches(false);
  }
}

TEST(ACounterThatCannotBeReset) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LoadForward(PointerKernels(), Weights::kPointers, stream);
  fake.FailAt("cuMemsetD32Async");
  const std::string error = check::Thrown(
      [&] { LaunchForward(PointerKernels(), Dynamic(PointerProblem(64, 64, 64, 2)), stream); });
  CHECK_CONTAINS(error, "cuMemsetD32Async failed: CUDA_ERROR_FAKE");
  CHECK_CONTAINS(error, "kernel sm90_pointers_bk_f16_scaled");
  CHECK_EQ(fake.launched.size(), 0u);
  CHECK_EQ(ContextDepth(), 0u);
}

TEST(PrologueLaunchIsNamed) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LoadForward(PointerKernels(), Weights::kPointers, stream);
  fake.FailAt("cuLaunchKernelEx");
  const std::string error = check::Thrown(
      [&] { LaunchForward(PointerKernels(), PointerProblem(64, 64, 64, 2), stream); });
  CHECK_CONTAINS(error, "kernel sm90_maps_from_memory");
}

TEST(UnsupportedDevices) {
  for (auto [major, minor] : {std::pair{8, 0}, {8, 9}, {9, 1}, {10, 1}, {11, 0}, {12, 0}}) {
    FakeDriver fake;
    const CUstream stream = fake.AddDevice(major, minor, "Fake Other");
    const std::string error =
        check::Thrown([&] { LoadForward(DenseKernels(), Weights::kDense, stream); });
    CHECK_CONTAINS(error, "Fake Other, compute capability " + std::to_string(major) + "." +
                              std::to_string(minor));
    CHECK_CONTAINS(error, "9.0 (Hopper), 10.0 and 10.3 (Blackwell)");
    CHECK_CONTAINS(error, "implementation=\"reference\"");
    CHECK_EQ(fake.loads.size(), 0u);
  }
}

TEST(KernelsOfOneArchitecture) {
  FakeDriver fake;
  const CUstream hopper = fake.AddDevice(9, 0, "Fake H200");
  const CUstream blackwell = fake.AddDevice(10, 0, "Fake B200");
  struct Case {
    const char *sm90, *sm100;
    CUstream at_home, elsewhere;
    std::vector<const char*> parts;
  };
  const std::vector<Case> cases = {
      {"sm90_dense_bk_bf16_plain",
       "",
       hopper,
       blackwell,
       {"no kernel for device 1 (Fake B200, compute capability 10.0)",
        "mma_tiler_mn or cluster_shape_mn is compiled for sm_90 only",
        "leave both out, or name a tile of sm_100"}},
      {"",
       "sm100_dense_bk_bf16_plain",
       blackwell,
       hopper,
       {"no kernel for device 0 (Fake H200, compute capability 9.0)",
        "mma_tiler_mn or cluster_shape_mn is compiled for sm_100 only",
        "leave both out, or name a tile of sm_90"}},
  };
  for (const Case& c : cases) {
    const CallKernels kernels = FindKernels(FORWARD, c.sm90, c.sm100);
    LoadForward(kernels, Weights::kDense, c.at_home);
    LaunchForward(kernels, DenseProblem(64, 64, 64, 2), c.at_home);
    const std::string load =
        check::Thrown([&] { LoadForward(kernels, Weights::kDense, c.elsewhere); });
    const std::string launch =
        check::Thrown([&] { LaunchForward(kernels, DenseProblem(64, 64, 64, 2), c.elsewhere); });
    for (const char* part : c.parts) {
      CHECK_CONTAINS(load, part);
      CHECK_CONTAINS(launch, part);
    }
    // Errors from before a kernel is chosen name the one that there is.
    fake.FailAt("cuStreamGetCtx");
    CHECK_CONTAINS(check::Thrown([&] { LoadForward(kernels, Weights::kDense, c.at_home); }),
                   Text("; kernel ", c.sm90, c.sm100, ", device of the given stream"));
    fake.FailAt("");
  }
  CHECK_EQ(fake.launched.size(), 2u);
  CHECK_EQ(ContextDepth(), 0u);
}

TEST(Operands) {
  struct Case {
    std::function<void(ForwardProblem&)> spoil;
    std::vector<const char*> parts;
  };
  const int64_t limit = std::numeric_limits<int32_t>::max() - 1024;
  const std::vector<Case> cases = {
      {[](ForwardProblem& p) { p.a = 0; }, {"a must be a device address; got null"}},
      {[](ForwardProblem& p) { p.a += 8; }, {"a must be aligned to 16 bytes", "0x7f0000000108"}},
      {[](ForwardProblem& p) { p.b += 2; }, {"b must be aligned to 16 bytes"}},
      {[](ForwardProblem& p) { p.b = 0; }, {"b must be a device address"}},
      {[](ForwardProblem& p) { p.d += 8; }, {"d must be aligned to 16 bytes"}},
      {[](ForwardProblem& p) { p.d = 0; }, {"d must be a device address"}},
      {[](ForwardProblem& p) { p.offsets = 0; }, {"offsets must be a device address"}},
      {[](ForwardProblem& p) { p.offsets += 2; }, {"offsets must be aligned to 4 bytes"}},
      {[](ForwardProblem& p) { p.alpha = 2; }, {"alpha must be aligned to 4 bytes"}},
      {[](ForwardProblem& p) { p.prob = 2; }, {"prob must be aligned to 4 bytes"}},
      {[](ForwardProblem& p) { p.k = 12; }, {"k must be a multiple of 8", "got 12", "pad", "16"}},
      {[](ForwardProblem& p) { p.n = 60; }, {"n must be a multiple of 8", "got 60", "pad", "64"}},
      {[](ForwardProblem& p) { p.k = 0; }, {"k must be between 1 and 2147482623; got 0"}},
      {[](ForwardProblem& p) { p.l = 0; }, {"l must be between 1 and"}},
      {[](ForwardProblem& p) { p.groups = 0, p.experts = kExperts; },
       {"groups must be between 1 and 2147482623; got 0"}},
      {[=](ForwardProblem& p) { p.groups = limit + 1, p.experts = kExperts; },
       {"groups must be between 1 and", "2147482624"}},
      {[](ForwardProblem& p) { p.groups = 3; },
       {"groups must be l = 2 where experts is null; got 3", "pass the experts of the groups"}},
      {[](ForwardProblem& p) { p.experts = 2; }, {"experts must be aligned to 4 bytes"}},
      {[](ForwardProblem& p) { p.m = -1; }, {"m must be between 1 and", "got -1"}},
      {[=](ForwardProblem& p) { p.m = limit + 1; },
       {"m must be between 1 and", "2147482624", "split"}},
      {[](ForwardProblem& p) { p.n = p.k = int64_t{1} << 20; },
       {"b: the copy engine needs strides", "split"}},
      {[](ForwardProblem& p) { p.b_major = N_MAJOR; }, {"does not read b in this b_major"}},
      {[](ForwardProblem& p) { p.d_element = F32; }, {"does not write d in this dtype"}},
      {[](ForwardProblem& p) { p.alpha = kAlpha; }, {"does not scale by alpha"}},
      {[](ForwardProblem& p) { p.prob = kProb; }, {"does not scale by prob"}},
      {[](ForwardProblem& p) {
         p.weights = Weights::kPointers;
         p.scratch = kScratch;
       },
       {"does not take weights in this form"}},
      {[](ForwardProblem& p) { p = WithBias(p, F32); }, {"does not add bias"}},
      {[](ForwardProblem& p) { p = WithC(p, BF16, BF16); }, {"does not write c;"}},
      {[](ForwardProblem& p) { p.bias = kBias; },
       {"bias must be null where bias_dtype is missing; got address 0x7f6000000004", "pass both"}},
      {[](ForwardProblem& p) { p.c = kC; },
       {"c must be null where c_dtype is missing; got address 0x7f9000000100", "pass both"}},
      {[](ForwardProblem& p) { p.dynamic = true; }, {"scratch must be a device address; got null"}},
      {[](ForwardProblem& p) {
         p.dynamic = true;
         p.scratch = kScratch + 64;
       },
       {"scratch must be aligned to 128 bytes"}},
      {[](ForwardProblem& p) { p.overlap_margin = -1; },
       {"overlap_margin must be between 0 and 118 SMs", "60 clusters of 2 CTAs", "got -1",
        "device 0 (Fake GPU", "pass 0 to use every SM"}},
      {[](ForwardProblem& p) { p.overlap_margin = 119; },
       {"overlap_margin must be between 0 and 118 SMs", "got 119"}},
      {[](ForwardProblem& p) { p.overlap_margin = std::numeric_limits<int64_t>::max(); },
       {"overlap_margin must be between 0 and 118 SMs", "got 9223372036854775807"}},
      {[](ForwardProblem& p) { p.overlap_margin = std::numeric_limits<int64_t>::min(); },
       {"overlap_margin must be between 0 and 118 SMs", "got -9223372036854775808"}},
  };
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LoadForward(DenseKernels(), Weights::kDense, stream);
  for (const Case& c : cases) {
    ForwardProblem p = DenseProblem(64, 64, 64, 2);
    c.spoil(p);
    const std::string error = check::Thrown([&] { LaunchForward(DenseKernels(), p, stream); });
    for (const char* part : c.parts) CHECK_CONTAINS(error, part);
    CHECK_EQ(ContextDepth(), 0u);
  }
  CHECK_EQ(fake.launched.size(), 0u);
  CHECK_EQ(fake.memsets.size(), 0u);
}

TEST(BiasAndCOperands) {
  struct Case {
    std::function<void(ForwardProblem&)> spoil;
    const char* part;
  };
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  auto check_all = [&](const CallKernels& kernels, const ForwardProblem& good,
                       const std::vector<Case>& cases) {
    LoadForward(kernels, good.weights, stream);
    LaunchForward(kernels, good, stream);
    fake.launched.clear();
    for (const Case& c : cases) {
      ForwardProblem p = good;
      c.spoil(p);
      CHECK_CONTAINS(check::Thrown([&] { LaunchForward(kernels, p, stream); }), c.part);
      CHECK_EQ(ContextDepth(), 0u);
    }
    CHECK_EQ(fake.launched.size(), 0u);
  };
  check_all(BiasKernels(), WithBias(DenseProblem(64, 64, 64, 2), F32),
            {{[](ForwardProblem& p) { p.bias = 0; }, "bias must be a device address; got null"},
             {[](ForwardProblem& p) { p.bias += 2; }, "bias must be aligned to 4 bytes"},
             {[](ForwardProblem& p) { p.bias += 1, p.bias_element = BF16; },
              "bias must be aligned to 2 bytes"},
             {[](ForwardProblem& p) { p.bias += 1, p.bias_element = F16; },
              "bias must be aligned to 2 bytes"},
             {[](ForwardProblem& p) { p.bias = 0, p.bias_element = NONE; },
              "kernel sm90_dense_bk_bf16_bias does not leave bias out; name the kernel"},
             {[](ForwardProblem& p) { p = WithC(p, BF16, F32); }, "does not write c;"}});
  check_all(DenseCKernels(), WithC(DenseProblem(64, 64, 64, 2), F32, F16),
            {{[](ForwardProblem& p) { p.c = 0; }, "c must be a device address; got null"},
             {[](ForwardProblem& p) { p.c += 8; }, "c must be aligned to 16 bytes"},
             {[](ForwardProblem& p) { p.c = 0, p.c_element = NONE; }, "does not leave c out"},
             {[](ForwardProblem& p) { p.c_element = F32; }, "does not write c in this dtype"},
             {[](ForwardProblem& p) { p.d_element = BF16; }, "does not write d in this dtype"}});
  check_all(PointerCKernels(), WithC(PointerProblem(64, 64, 64, 2), BF16, F32),
            {{[](ForwardProblem& p) { p.c_element = BF16; }, "does not write c in this dtype"},
             {[](ForwardProblem& p) { p.d_element = F32; }, "does not write d in this dtype"}});

  // No kernel of the table is without a counter, or without experts.
  auto error_without = [&](Field field, const ForwardProblem& p) {
    Kernel kernel = *FindKernel("sm90_dense_bk_bf16_plain");
    for (FieldSlot& slot : kernel.fields) {
      if (slot.field == field) slot.field = PTR_ALPHA;
    }
    return check::Thrown([&] { LaunchForward({&kernel, nullptr}, p, stream); });
  };
  const ForwardProblem p = DenseProblem(64, 64, 64, 2);
  CHECK_CONTAINS(error_without(PTR_COUNTER, Dynamic(p)),
                 "sm90_dense_bk_bf16_plain does not schedule its tiles dynamically");
  CHECK_CONTAINS(error_without(PTR_EXPERTS, Mapped(p, 3)),
                 "sm90_dense_bk_bf16_plain does not map groups to experts");
}

TEST(PointerOperands) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LoadForward(PointerKernels(), Weights::kPointers, stream);
  auto error = [&](const ForwardProblem& p) {
    return check::Thrown([&] { LaunchForward(PointerKernels(), p, stream); });
  };
  ForwardProblem p = PointerProblem(64, 64, 64, 2);
  p.scratch += 64;
  CHECK_CONTAINS(error(p), "scratch must be aligned to 128 bytes");
  p = PointerProblem(64, 64, 64, 2);
  p.b += 4;
  CHECK_CONTAINS(error(p), "b_ptrs must be aligned to 8 bytes");
  p = PointerProblem(64, 64, 64, 2);
  p.weights = Weights::kTuple;
  CHECK_CONTAINS(error(p), "weight addresses");
  const Address addresses[] = {kB, kB + 8};
  p.weight_addresses = addresses;
  CHECK_CONTAINS(error(p), "b's arrays must be aligned to 16 bytes");
}

TEST(UnknownKernels) {
  CHECK_CONTAINS(check::Thrown([] { FindKernels(FORWARD, "sm90_nothing", "sm100_nothing"); }),
                 "no forward kernel 'sm90_nothing' for sm_90");
  CHECK_CONTAINS(check::Thrown([] {
                   FindKernels(FORWARD, "sm90_dense_bk_bf16_plain", "sm90_dense_bk_bf16_plain");
                 }),
                 "for sm_100");
  CHECK_CONTAINS(check::Thrown([] {
                   FindKernels(FORWARD, "sm90_maps_by_value", "sm100_dense_bk_bf16_plain");
                 }),
                 "no forward kernel 'sm90_maps_by_value'");
  CHECK_CONTAINS(check::Thrown([] { FindKernels(FORWARD, "", ""); }),
                 "sm90 or sm100 must name a forward kernel; got neither");
}

TEST(NoDriver) {
  if (DriverStatus() == nullptr) return;  // this machine has one
  CHECK_CONTAINS(DriverStatus(), "libcuda.so.1");
  CHECK_CONTAINS(check::Thrown([] { GetDriver(); }), "implementation=\"reference\"");
}

jgg_call CCall(CUstream stream) {
  jgg_call call = {};
  call.struct_size = sizeof(call);
  call.sm90 = "sm90_dense_bk_bf16_plain";
  call.sm100 = "sm100_dense_bk_bf16_plain";
  call.weights = "dense";
  call.b_major = "k";
  call.d_dtype = "bfloat16";
  call.m = call.n = call.k = 64;
  call.l = call.groups = 2;
  call.a = kA;
  call.offsets = kOffsets;
  call.b = kB;
  call.d = kD;
  call.stream = reinterpret_cast<uint64_t>(stream);
  return call;
}

TEST(CEntry) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  jgg_call call = CCall(stream);
  CHECK(jgg_forward(&call) == nullptr);
  CHECK(jgg_forward(&call) == nullptr);
  CHECK_EQ(fake.launched.size(), 2u);
  CHECK_EQ(fake.loads.size(), 1u);

  call.weights = "sparse";
  CHECK_CONTAINS(jgg_forward(&call),
                 "weights must be 'dense', 'pointers' or 'tuple'; got 'sparse'");
  call = CCall(stream);
  call.b_major = nullptr;
  CHECK_CONTAINS(jgg_forward(&call), "b_major must be 'k' or 'n'; got ''");
  call = CCall(stream);
  call.d_dtype = "int8";
  CHECK_CONTAINS(jgg_forward(&call), "d_dtype must be");
  call = CCall(stream);
  call.c_dtype = "";
  CHECK_CONTAINS(jgg_forward(&call), "c_dtype must be 'bfloat16', 'float16' or 'float32'; got ''");
  call = CCall(stream);
  call.bias_dtype = "int8";
  CHECK_CONTAINS(jgg_forward(&call), "bias_dtype must be");
  for (int64_t dynamic : {-1, 2}) {
    call = CCall(stream);
    call.dynamic = dynamic;
    CHECK_CONTAINS(jgg_forward(&call), "dynamic must be 0 or 1; got " + std::to_string(dynamic));
  }
  call = CCall(stream);
  call.groups = 3;
  CHECK_CONTAINS(jgg_forward(&call), "groups must be l = 2 where experts is null; got 3");
  call = CCall(stream);
  call.overlap_margin = 119;
  CHECK_CONTAINS(jgg_forward(&call), "overlap_margin must be between 0 and 118");
  call = CCall(stream);
  call.struct_size = 8;
  CHECK_CONTAINS(jgg_forward(&call), "struct_size");
  CHECK_CONTAINS(jgg_forward(nullptr), "struct_size");
  CHECK_EQ(fake.launched.size(), 2u);
}

TEST(CEntryWithEveryOperand) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  jgg_call call = CCall(stream);
  call.sm90 = "sm90_pointers_bk_16bit_c_f32";
  call.sm100 = nullptr;
  call.weights = "pointers";
  call.d_dtype = "float16";
  call.c_dtype = "float32";
  call.bias_dtype = "bfloat16";
  call.dynamic = 1;
  call.overlap_margin = 100;
  call.m = 100'000;
  call.groups = 5;
  call.experts = kExperts;
  call.alpha = kAlpha;
  call.prob = kProb;
  call.bias = kBias;
  call.c = kC;
  call.scratch = kScratch;
  CHECK(jgg_forward(&call) == nullptr);
  const Launched& launch = fake.launched.at(1);
  CHECK_EQ(launch.grid, 20u);
  CHECK_EQ(launch.Value<uint64_t>(PTR_OFFSETS), kOffsets);
  CHECK_EQ(launch.Value<uint64_t>(PTR_EXPERTS), kExperts);
  CHECK_EQ(launch.Value<int32_t>(DIM_L), 2);
  CHECK_EQ(launch.Value<int32_t>(DIM_GROUPS), 5);
  CHECK_EQ(launch.Value<uint64_t>(PTR_ALPHA), kAlpha);
  CHECK_EQ(launch.Value<uint64_t>(PTR_PROB), kProb);
  CHECK_EQ(launch.Value<uint64_t>(PTR_BIAS), kBias);
  CHECK_EQ(launch.Value<int32_t>(TYPE_BIAS), BF16);
  CHECK_EQ(launch.Value<int32_t>(TYPE_D), F16);
  CHECK_EQ(fake.MapIn(launch, MAP_D).address, kD - 32 * 128);
  CHECK_EQ(fake.MapIn(launch, MAP_C).address, kC - 32 * 256);
  CHECK_EQ(fake.memsets.at(0).address, kScratch + 256);
  call.dynamic = 0;
  call.sm100 = "";
  CHECK(jgg_forward(&call) == nullptr);
  CHECK_EQ(fake.memsets.size(), 1u);
  call.sm90 = nullptr;
  CHECK_CONTAINS(jgg_forward(&call), "got neither");
}

TEST(CEntryDoesNotLoadUnderCapture) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  jgg_call call = CCall(stream);
  fake.capturing.insert(stream);
  CHECK_CONTAINS(jgg_forward(&call), "make the call once before the capture");
  CHECK_EQ(fake.loads.size(), 0u);
  fake.capturing.clear();
  CHECK(jgg_forward(&call) == nullptr);
  fake.capturing.insert(stream);
  CHECK(jgg_forward(&call) == nullptr);
  CHECK(fake.illegal_under_capture.empty());
}

}  // namespace
}  // namespace jgg

TEST_MAIN
