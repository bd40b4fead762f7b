// Weight gradients: what is encoded, packed and launched for a call, and what is refused.

#include <functional>
#include <limits>

#include "c_api.h"
#include "check.h"
#include "check_map.h"
#include "error.h"
#include "fake_driver.h"
#include "launch.h"
#include "problems.h"

namespace jgg {
namespace {

constexpr uint64_t kSpan = 1073741824;      // 2^30
constexpr uint64_t kWrapped = 17179869184;  // 2^34
constexpr auto kBf16Map = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
constexpr auto kF32Map = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;

void Run(const CallKernels& kernels, const WgradProblem& problem, CUstream stream) {
  LoadWgrad(kernels, stream);
  LaunchWgrad(kernels, problem, stream);
}

// --- maps, parameters, launches -----------------------------------------------------------------

TEST(MapsAndParameters) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  WgradProblem p = MakeWgradProblem(1000, 512, 264, 8);
  p.alpha = kAlpha;
  Run(WgradKernels(), p, stream);

  CHECK_EQ(fake.loads.size(), 1u);
  CHECK_EQ(fake.launched.size(), 1u);
  const Launched& launch = fake.launched[0];
  CHECK_EQ(launch.kernel->name, "sm90_wgrad_bf16");
  CHECK_EQ(launch.stream, stream);
  CHECK_EQ(launch.block, 384u);
  CHECK_EQ(launch.shared_bytes, 200000u);
  CHECK_EQ(launch.cluster, 2u);
  // 8 * ceil(512 / 256) * ceil(264 / 256) = 32 clusters of 2.
  CHECK_EQ(launch.grid, 64u);
  CheckMap(fake.MapIn(launch, MAP_A), kBf16Map, kX, {512, kSpan, 1001, kSpan + 1},
           {1024, 1024, kWrapped - 1024}, {64, 64, 1, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  CheckMap(fake.MapIn(launch, MAP_B), kBf16Map, kY, {264, kSpan, 1001, kSpan + 1},
           {528, 528, kWrapped - 528}, {64, 32, 1, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  CheckMap(fake.MapIn(launch, MAP_D), kBf16Map, kD, {264, 512, 8}, {528, 270336}, {64, 64, 1},
           CU_TENSOR_MAP_SWIZZLE_128B);
  CHECK_EQ(launch.Value<uint64_t>(PTR_OFFSETS), kOffsets);
  CHECK_EQ(launch.Value<uint64_t>(PTR_EXPERTS), 0u);
  CHECK_EQ(launch.Value<uint64_t>(PTR_COUNTER), 0u);
  CHECK_EQ(launch.Value<uint64_t>(PTR_ALPHA), kAlpha);
  CHECK_EQ(launch.Value<int32_t>(DIM_M), 1000);
  for (int occurrence : {0, 1}) {
    CHECK_EQ(launch.Value<int32_t>(DIM_LOAD_ROWS, occurrence), 1001);
    CHECK_EQ(launch.Value<int32_t>(DIM_N, occurrence), 512);
    CHECK_EQ(launch.Value<int32_t>(DIM_K, occurrence), 264);
    CHECK_EQ(launch.Value<int32_t>(DIM_L, occurrence), 8);
  }
  CHECK_EQ(launch.Value<int32_t>(DIM_GROUPS), 8);
}

TEST(Accumulating) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const WgradProblem p = AccumulateProblem(1000, 512, 264, 2);
  Run(AccumulateKernels(), p, stream);
  const Launched& launch = fake.launched.at(0);
  CHECK_EQ(launch.kernel->name, "sm90_wgrad_f32_accumulate");
  // 2 * ceil(512 / 128) * ceil(264 / 192) = 16 clusters of 1.
  CHECK_EQ(launch.grid, 16u);
  CheckMap(fake.MapIn(launch, MAP_D), kF32Map, kD, {264, 512, 2}, {1056, 540672}, {32, 64, 1},
           CU_TENSOR_MAP_SWIZZLE_128B);
  CHECK_EQ(launch.Value<uint64_t>(PTR_ALPHA), 0u);
}

TEST(Blackwell) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(10, 3);
  Run(WgradKernels(), MakeWgradProblem(1000, 512, 264, 8), stream);
  CHECK_EQ(fake.launched.at(0).kernel->name, "sm100_wgrad_bf16");
  CHECK_EQ(fake.launched.at(0).cluster, 4u);
  CHECK_EQ(fake.launched.at(0).grid, 128u);  // 8 * ceil(512 / 256) * ceil(264 / 256), of 4
}

TEST(GroupsMappedToExperts) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  // Tiles are the experts': as many for fewer groups, and for more.
  for (int64_t groups : {3, 20}) {
    fake.launched.clear();
    Run(WgradKernels(), Mapped(MakeWgradProblem(1000, 512, 264, 8), groups), stream);
    const Launched& launch = fake.launched.at(0);
    CHECK_EQ(launch.grid, 64u);
    CHECK_EQ(launch.Value<uint64_t>(PTR_EXPERTS), kExperts);
    CHECK_EQ(launch.Value<int32_t>(DIM_GROUPS), groups);
    CHECK_EQ(launch.Value<int32_t>(DIM_L), 8);
    CHECK_EQ(fake.MapIn(launch, MAP_D).dims, (U64{264, 512, 8}));
  }
}

TEST(DynamicSchedule) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const WgradProblem p = Dynamic(MakeWgradProblem(1000, 512, 264, 8));
  Run(WgradKernels(), p, stream);
  fake.capturing.insert(stream);
  LaunchWgrad(WgradKernels(), p, stream);
  CHECK(fake.illegal_under_capture.empty());
  CHECK_EQ(fake.memsets.size(), 2u);
  for (size_t i : {0, 1}) {
    const Memset& reset = fake.memsets.at(i);
    CHECK_EQ(reset.address, kScratch);
    CHECK_EQ(reset.value, 0u);
    CHECK_EQ(reset.count, 1u);
    CHECK_EQ(reset.stream, stream);
    CHECK_EQ(reset.launches_before, i);
    CHECK_EQ(fake.launched.at(i).Value<uint64_t>(PTR_COUNTER), kScratch);
  }
  // A static call has no counter, even with scratch.
  WgradProblem fixed = p;
  fixed.dynamic = false;
  LaunchWgrad(WgradKernels(), fixed, stream);
  CHECK_EQ(fake.launched.at(2).Value<uint64_t>(PTR_COUNTER), 0u);
  CHECK_EQ(fake.memsets.size(), 2u);
}

TEST(OverlapMargin) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  WgradProblem p = MakeWgradProblem(1000, 4096, 4096, 8);
  Run(WgradKernels(), p, stream);
  CHECK_EQ(fake.launched.at(0).grid, 120u);  // the device holds 60 clusters of 2
  p.overlap_margin = 5;
  LaunchWgrad(WgradKernels(), p, stream);
  CHECK_EQ(fake.launched.at(1).grid, 114u);
}

// Every shape against the formulas of docs/architecture.md, with arithmetic of its own.
TEST(ManyShapes) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LoadWgrad(WgradKernels(), stream);
  uint64_t random = 1;
  auto pick = [&random](uint64_t limit) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((random >> 33) % limit) + 1;
  };
  for (int i = 0; i < 2000; ++i) {
    const int64_t m = pick(i % 2 ? 300 : 2'000'000'000), n = 8 * pick(i % 5 ? 100 : 40'000);
    const int64_t k = 8 * pick(i % 7 ? 100 : 40'000), l = pick(i % 3 ? 16 : 1024);
    fake.encoded.clear();
    fake.launched.clear();
    LaunchWgrad(WgradKernels(), MakeWgradProblem(m, n, k, l), stream);
    const Launched& launch = fake.launched.at(0);
    const __int128 tiles = __int128{l} * ((n + 255) / 256) * ((k + 255) / 256);
    CHECK_EQ(launch.grid, tiles < 60 ? unsigned(2 * tiles) : 120u);
    CHECK_EQ(launch.Value<int32_t>(DIM_LOAD_ROWS), m + 1);
    for (auto [field, base, columns] : {std::tuple{MAP_A, kX, n}, {MAP_B, kY, k}}) {
      const EncodedMap& map = fake.MapIn(launch, field);
      CHECK_EQ(map.dims, (U64{uint64_t(columns), kSpan, uint64_t(m) + 1, kSpan + 1}));
      // A box of R rows from row r of a group that ends at e, at x = 2^30 - c, y = r + c with
      // c = min(e - r, R). Its first row is row r, for any c, and row e is the first outside.
      const uint64_t r = pick(m) - 1;
      for (uint64_t c : {uint64_t{1}, uint64_t(pick(256)), uint64_t{256}}) {
        const uint64_t x = kSpan - c, y = r + c;
        const uint64_t address =
            map.address + x * map.strides[0] + y * map.strides[1] + kSpan * map.strides[2];
        CHECK_EQ(address, base + r * 2 * uint64_t(columns));
        CHECK_EQ(x + c, map.dims[1]);
        CHECK(r + c > uint64_t(m) || y < map.dims[2]);
      }
    }
  }
}

TEST(SizesPastThirtyTwoBits) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const int64_t limit = std::numeric_limits<int32_t>::max() - 1024;
  const int64_t longest = limit / 8 * 8;
  // The longest rows, as far as D allows them: strides stay positive.
  Run(WgradKernels(), MakeWgradProblem(limit, longest, 8, limit), stream);
  const Launched& launch = fake.launched.at(0);
  CHECK_EQ(fake.MapIn(launch, MAP_A).dims,
           (U64{uint64_t(longest), kSpan, uint64_t(limit) + 1, kSpan + 1}));
  CHECK_EQ(fake.MapIn(launch, MAP_A).strides.at(2), kWrapped - 2 * uint64_t(longest));
  CHECK_EQ(launch.Value<int32_t>(DIM_LOAD_ROWS), limit + 1);
  CHECK_EQ(launch.grid, 120u);
  // More tiles than an int64 counts, were D's strides not refused.
  CHECK_CONTAINS(check::Thrown([&] {
                   LaunchWgrad(WgradKernels(), MakeWgradProblem(limit, longest, longest, limit),
                               stream);
                 }),
                 "d: the copy engine needs strides below 2^40 bytes");
}

TEST(NothingToDo) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LaunchWgrad(WgradKernels(), MakeWgradProblem(1000, 0, 264, 8), stream);
  LaunchWgrad(WgradKernels(), MakeWgradProblem(1000, 512, 0, 8), stream);
  LaunchWgrad(WgradKernels(), MakeWgradProblem(1000, 512, 264, 0), stream);
  CHECK_EQ(fake.calls.size(), 0u);
}

TEST(CallsAreCounted) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const CUstream other = fake.AddStream(stream);
  const WgradProblem p = MakeWgradProblem(1000, 512, 264, 8);
  LoadWgrad(WgradKernels(), stream);
  LoadForward(DenseKernels(), Weights::kDense, stream);
  CountLaunches(true);
  LaunchWgrad(WgradKernels(), p, stream);
  fake.capturing.insert(other);
  LaunchWgrad(WgradKernels(), p, other);
  LaunchForward(DenseKernels(), DenseProblem(64, 64, 64, 2), other);
  CHECK_EQ(GetLaunchCounts().launches, 3);
  CHECK_EQ(GetLaunchCounts().captured, 2);
  CHECK(fake.illegal_under_capture.empty());
  CountLaunches(false);
}

// --- errors -------------------------------------------------------------------------------------

TEST(Operands) {
  struct Case {
    std::function<void(WgradProblem&)> spoil;
    std::vector<const char*> parts;
  };
  const int64_t limit = std::numeric_limits<int32_t>::max() - 1024;
  const std::vector<Case> cases = {
      {[](WgradProblem& p) { p.x = 0; }, {"x must be a device address; got null"}},
      {[](WgradProblem& p) { p.x += 8; }, {"x must be aligned to 16 bytes", "0x7f0000000108"}},
      {[](WgradProblem& p) { p.y = 0; }, {"y must be a device address; got null"}},
      {[](WgradProblem& p) { p.y += 8; }, {"y must be aligned to 16 bytes"}},
      {[](WgradProblem& p) { p.d = 0; }, {"d must be a device address; got null"}},
      {[](WgradProblem& p) { p.d += 8; }, {"d must be aligned to 16 bytes"}},
      {[](WgradProblem& p) { p.offsets = 0; }, {"offsets must be a device address; got null"}},
      {[](WgradProblem& p) { p.offsets += 2; }, {"offsets must be aligned to 4 bytes"}},
      {[](WgradProblem& p) { p.experts = 2; }, {"experts must be aligned to 4 bytes"}},
      {[](WgradProblem& p) { p.alpha = 2; }, {"alpha must be aligned to 4 bytes"}},
      {[](WgradProblem& p) { p.groups = 3; },
       {"groups must be l = 2 where experts is null; got 3", "pass the experts of the groups"}},
      {[](WgradProblem& p) { p.groups = 0, p.experts = kExperts; },
       {"groups must be between 1 and 2147482623; got 0"}},
      {[](WgradProblem& p) { p.m = 0; },
       {"m must be between 1 and 2147482623; got 0", "an empty product is zeros, and needs no"}},
      {[=](WgradProblem& p) { p.m = limit + 1; }, {"m must be between 1 and", "split"}},
      {[=](WgradProblem& p) { p.l = p.groups = limit + 1; }, {"l must be between 1 and", "split"}},
      {[](WgradProblem& p) { p.n = 60; }, {"n must be a multiple of 8", "got 60", "pad", "64"}},
      {[](WgradProblem& p) { p.n = -8; }, {"n must be between 1 and 2147482623; got -8"}},
      {[](WgradProblem& p) { p.k = 12; }, {"k must be a multiple of 8", "got 12", "pad", "16"}},
      {[](WgradProblem& p) { p.n = p.k = int64_t{1} << 20; },
       {"d: the copy engine needs strides below 2^40 bytes; got 2199023255552", "split n or k"}},
      {[](WgradProblem& p) { p.d_element = F32; },
       {"kernel sm90_wgrad_bf16 does not write d in this dtype; name the kernel"}},
      {[](WgradProblem& p) { p.accumulate = true; },
       {"kernel sm90_wgrad_bf16 does not add to what d holds; name the kernel"}},
      {[](WgradProblem& p) { p.dynamic = true; }, {"scratch must be a device address; got null"}},
      {[](WgradProblem& p) {
         p.dynamic = true;
         p.scratch = kScratch + 64;
       },
       {"scratch must be aligned to 128 bytes"}},
      {[](WgradProblem& p) { p.overlap_margin = -1; },
       {"overlap_margin must be between 0 and 118 SMs", "got -1", "device 0 (Fake GPU"}},
      {[](WgradProblem& p) { p.overlap_margin = 119; },
       {"overlap_margin must be between 0 and 118"}},
  };
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LoadWgrad(WgradKernels(), stream);
  for (const Case& c : cases) {
    WgradProblem p = MakeWgradProblem(64, 64, 64, 2);
    c.spoil(p);
    const std::string error = check::Thrown([&] { LaunchWgrad(WgradKernels(), p, stream); });
    for (const char* part : c.parts) CHECK_CONTAINS(error, part);
    CHECK_EQ(ContextDepth(), 0u);
  }
  const CallKernels accumulate = AccumulateKernels();
  const CallKernels overwrite = FindKernels(WGRAD, "sm90_wgrad_f32", "");
  LoadWgrad(accumulate, stream);
  LoadWgrad(overwrite, stream);
  WgradProblem p = AccumulateProblem(64, 64, 64, 2);
  CHECK_CONTAINS(check::Thrown([&] { LaunchWgrad(overwrite, p, stream); }),
                 "kernel sm90_wgrad_f32 does not add to what d holds");
  p.accumulate = false;
  CHECK_CONTAINS(check::Thrown([&] { LaunchWgrad(accumulate, p, stream); }),
                 "kernel sm90_wgrad_f32_accumulate does not overwrite d; name the kernel");
  p.accumulate = true;
  p.d_element = BF16;
  CHECK_CONTAINS(check::Thrown([&] { LaunchWgrad(accumulate, p, stream); }),
                 "does not write d in this dtype");
  CHECK_EQ(fake.launched.size(), 0u);
  CHECK_EQ(fake.memsets.size(), 0u);
}

TEST(EveryDriverCallInExecute) {
  for (const char* call :
       {"cuStreamGetCtx", "cuCtxGetId", "cuCtxPushCurrent", "cuTensorMapEncodeTiled",
        "cuMemsetD32Async", "cuLaunchKernelEx", "cuStreamIsCapturing"}) {
    FakeDriver fake;
    const CUstream stream = fake.AddDevice(9, 0);
    LoadWgrad(WgradKernels(), stream);
    CountLaunches(true);
    fake.FailAt(call);
    const std::string error = check::Thrown(
        [&] { LaunchWgrad(WgradKernels(), Dynamic(MakeWgradProblem(64, 64, 64, 2)), stream); });
    CHECK_CONTAINS(error, std::string(call) + " failed: CUDA_ERROR_FAKE");
    CHECK_CONTAINS(error, "sm90_wgrad_bf16");
    CHECK_EQ(ContextDepth(), 0u);
    CountLaunches(false);
  }
}

TEST(KernelsByName) {
  CHECK_CONTAINS(check::Thrown([] { FindKernels(WGRAD, "sm90_nothing", ""); }),
                 "no wgrad kernel 'sm90_nothing' for sm_90");
  CHECK_CONTAINS(check::Thrown([] { FindKernels(WGRAD, "sm90_dense_bk_bf16_plain", ""); }),
                 "no wgrad kernel 'sm90_dense_bk_bf16_plain' for sm_90");
  CHECK_CONTAINS(check::Thrown([] { FindKernels(FORWARD, "sm90_wgrad_bf16", ""); }),
                 "no forward kernel 'sm90_wgrad_bf16' for sm_90");
  CHECK_CONTAINS(check::Thrown([] { FindKernels(WGRAD, "", "sm90_wgrad_bf16"); }),
                 "no wgrad kernel 'sm90_wgrad_bf16' for sm_100");
  CHECK_CONTAINS(check::Thrown([] { FindKernels(WGRAD, "", ""); }),
                 "sm90 or sm100 must name a wgrad kernel; got neither");
}

TEST(ExecuteNeverLoads) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  CHECK_CONTAINS(
      check::Thrown([&] { LaunchWgrad(WgradKernels(), MakeWgradProblem(64, 64, 64, 2), stream); }),
      "execute found its kernel not loaded");
  CHECK_EQ(fake.loads.size(), 0u);
}

TEST(TableIsConsistent) {
  struct Case {
    std::function<void(Kernel&)> spoil;
    std::string part;
  };
  std::vector<Case> cases = {
      {[](Kernel& k) { k.maps[0].rank = 2; }, Text("no map of rank 4 for field ", MAP_A)},
      {[](Kernel& k) { k.maps[1].rank = 3; }, Text("no map of rank 4 for field ", MAP_B)},
      {[](Kernel& k) { k.maps.pop_back(); }, Text("no map of rank 3 for field ", MAP_D)},
      {[](Kernel& k) { k.maps[0].element = F16; },
       Text("the map for field ", MAP_A, " has element 2, expected 1")},
      {[](Kernel& k) { k.maps[1].element = F16; },
       Text("the map for field ", MAP_B, " has element 2, expected 1")},
      {[](Kernel& k) { k.maps[2].element = BF16; },
       Text("the map for field ", MAP_D, " has element 1, expected 3")},
      {[](Kernel& k) { k.b_major = N_MAJOR; }, "weight gradients are K_MAJOR"},
      {[](Kernel& k) { k.c_element = F32; }, "weight gradients have no C"},
      {[](Kernel& k) { k.d_element = k.maps[2].element = BF16; },
       "weight gradients are F32, or BF16 where nothing is added to"},
      {[](Kernel& k) { k.accumulates = false, k.d_element = k.maps[2].element = F16; },
       "weight gradients are F32, or BF16"},
      {[](Kernel& k) { k.accumulates = false, k.d_element = k.maps[2].element = ANY16; },
       "weight gradients are F32, or BF16"},
      {[](Kernel& k) { k.tile.n = 0; }, "tile and cluster must be positive"},
      {[](Kernel& k) { k.cluster.m = 0; }, "tile and cluster must be positive"},
  };
  for (Field field :
       {MAP_A, MAP_B, MAP_D, PTR_OFFSETS, PTR_EXPERTS, PTR_COUNTER, PTR_ALPHA, DIM_GROUPS}) {
    cases.push_back({[field](Kernel& k) {
                       for (FieldSlot& slot : k.fields) {
                         if (slot.field == field) slot.field = FIRST;
                       }
                     },
                     Text("does not take field ", field)});
  }
  for (const Case& c : cases) {
    Kernel kernel = *FindKernel("sm90_wgrad_f32_accumulate");
    CHECK(kernel.accumulates);
    CHECK_EQ(Inconsistency(kernel), "");
    c.spoil(kernel);
    CHECK_CONTAINS(Inconsistency(kernel), c.part);
  }
  for (const char* name : {"sm90_dense_bk_bf16_plain", "sm90_maps_by_value"}) {
    Kernel kernel = *FindKernel(name);
    kernel.accumulates = true;
    CHECK_CONTAINS(Inconsistency(kernel), "only weight gradients accumulate");
  }
}

// --- the C entry --------------------------------------------------------------------------------

jgg_wgrad_call CCall(CUstream stream) {
  jgg_wgrad_call call = {};
  call.struct_size = sizeof(call);
  call.sm90 = "sm90_wgrad_bf16";
  call.sm100 = "sm100_wgrad_bf16";
  call.d_dtype = "bfloat16";
  call.m = 1000;
  call.n = 512;
  call.k = 264;
  call.l = call.groups = 3;
  call.x = kX;
  call.y = kY;
  call.offsets = kOffsets;
  call.d = kD;
  call.stream = reinterpret_cast<uint64_t>(stream);
  return call;
}

TEST(CEntry) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  jgg_wgrad_call call = CCall(stream);
  CHECK(jgg_wgrad(&call) == nullptr);
  CHECK(jgg_wgrad(&call) == nullptr);
  CHECK_EQ(fake.loads.size(), 1u);
  CHECK_EQ(fake.launched.size(), 2u);
  const Launched& minimal = fake.launched.at(0);
  CHECK_EQ(minimal.stream, stream);
  CHECK_EQ(minimal.Value<int32_t>(DIM_M), 1000);
  CHECK_EQ(minimal.Value<int32_t>(DIM_N), 512);
  CHECK_EQ(minimal.Value<int32_t>(DIM_K), 264);
  CHECK_EQ(minimal.Value<int32_t>(DIM_L), 3);
  CHECK_EQ(minimal.Value<int32_t>(DIM_GROUPS), 3);
  CHECK_EQ(minimal.Value<uint64_t>(PTR_EXPERTS), 0u);
  CHECK_EQ(fake.MapIn(minimal, MAP_A).address, kX);
  CHECK_EQ(fake.MapIn(minimal, MAP_B).address, kY);
  CHECK_EQ(fake.MapIn(minimal, MAP_D).address, kD);

  call.sm90 = "sm90_wgrad_f32_accumulate";
  call.sm100 = nullptr;
  call.d_dtype = "float32";
  call.accumulate = call.dynamic = 1;
  call.groups = 5;
  call.experts = kExperts;
  call.alpha = kAlpha;
  call.scratch = kScratch;
  call.overlap_margin = 50;
  CHECK(jgg_wgrad(&call) == nullptr);
  const Launched& full = fake.launched.at(2);
  CHECK_EQ(full.grid, 10u);
  CHECK_EQ(full.Value<int32_t>(DIM_GROUPS), 5);
  CHECK_EQ(full.Value<uint64_t>(PTR_OFFSETS), kOffsets);
  CHECK_EQ(full.Value<uint64_t>(PTR_EXPERTS), kExperts);
  CHECK_EQ(full.Value<uint64_t>(PTR_ALPHA), kAlpha);
  CHECK_EQ(full.Value<uint64_t>(PTR_COUNTER), kScratch);

  // No columns: kernels are loaded, and nothing is launched.
  call = CCall(fake.AddDevice(9, 0));
  call.n = 0;
  CHECK(jgg_wgrad(&call) == nullptr);
  CHECK_EQ(fake.loads.size(), 3u);
  CHECK_EQ(fake.launched.size(), 3u);
}

TEST(CEntryRefuses) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  struct Case {
    void (*spoil)(jgg_wgrad_call&);
    const char* part;
  };
  const std::vector<Case> cases = {
      {[](jgg_wgrad_call& c) { c.struct_size = sizeof(jgg_call); },
       "jgg_wgrad_call must have struct_size 160; got 216; use the header"},
      {[](jgg_wgrad_call& c) { c.sm90 = "sm90_dense_bk_bf16_plain"; },
       "no wgrad kernel 'sm90_dense_bk_bf16_plain' for sm_90"},
      {[](jgg_wgrad_call& c) { c.sm90 = c.sm100 = nullptr; }, "got neither"},
      {[](jgg_wgrad_call& c) { c.d_dtype = "int8"; }, "d_dtype must be"},
      {[](jgg_wgrad_call& c) { c.d_dtype = "float16"; }, "does not write d in this dtype"},
      {[](jgg_wgrad_call& c) { c.dynamic = 2; },
       "dynamic must be 0 or 1; got 2; pass 1 for a dynamic schedule"},
      {[](jgg_wgrad_call& c) { c.accumulate = -1; },
       "accumulate must be 0 or 1; got -1; pass 1 to add to what d holds"},
      {[](jgg_wgrad_call& c) { c.accumulate = 1; }, "does not add to what d holds"},
      {[](jgg_wgrad_call& c) { c.groups = 4; },
       "groups must be l = 3 where experts is null; got 4"},
  };
  for (const Case& c : cases) {
    jgg_wgrad_call call = CCall(stream);
    c.spoil(call);
    const char* error = jgg_wgrad(&call);
    CHECK_CONTAINS(error == nullptr ? "" : error, c.part);
  }
  CHECK_CONTAINS(jgg_wgrad(nullptr), "jgg_wgrad_call must have struct_size");
  CHECK_EQ(fake.launched.size(), 0u);
}

TEST(CEntryDoesNotLoadUnderCapture) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const jgg_wgrad_call call = CCall(stream);
  fake.capturing.insert(stream);
  CHECK_CONTAINS(jgg_wgrad(&call), "make the call once before the capture");
  CHECK_EQ(fake.loads.size(), 0u);
  fake.capturing.clear();
  CHECK(jgg_wgrad(&call) == nullptr);
  fake.capturing.insert(stream);
  CHECK(jgg_wgrad(&call) == nullptr);
  CHECK(fake.illegal_under_capture.empty());
}

}  // namespace
}  // namespace jgg

TEST_MAIN
