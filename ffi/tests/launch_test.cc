// What is encoded, packed and launched for a call.

#include "launch.h"

#include <algorithm>
#include <functional>
#include <tuple>

#include "check.h"
#include "check_map.h"
#include "error.h"
#include "fake_driver.h"
#include "problems.h"

namespace jgg {

namespace {

void Run(const CallKernels& kernels, const ForwardProblem& problem, CUstream stream) {
  LoadForward(kernels, problem.weights, stream);
  LaunchForward(kernels, problem, stream);
}

TEST(DenseKMajor) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const ForwardProblem p = DenseProblem(1000, 512, 256, 8);
  Run(DenseKernels(), p, stream);

  CHECK_EQ(fake.launched.size(), 1u);
  const Launched& launch = fake.launched[0];
  CHECK_EQ(launch.kernel->name, "sm90_dense_bk_bf16_plain");
  CHECK_EQ(launch.stream, stream);
  CHECK_EQ(launch.block, 384u);
  CHECK_EQ(launch.shared_bytes, 200000u);
  CHECK_EQ(launch.cluster, 2u);
  // (ceil(1000 / 256) + 8 + 1) * ceil(512 / 256) = 26 clusters of 2.
  CHECK_EQ(launch.grid, 52u);
  CheckMap(fake.MapIn(launch, MAP_A), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kA, {256, 1000}, {512},
           {64, 128}, CU_TENSOR_MAP_SWIZZLE_128B);
  CheckMap(fake.MapIn(launch, MAP_B), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kB, {256, 512, 8},
           {512, 262144}, {64, 256, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  CheckMap(fake.MapIn(launch, MAP_D), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kD - 64 * 1024,
           {512, 64, 1064}, {1024, 1024}, {64, 64, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  CHECK_EQ(launch.Value<uint64_t>(PTR_OFFSETS), kOffsets);
  CHECK_EQ(launch.Value<int32_t>(DIM_M), 1000);
  CHECK_EQ(launch.Value<int32_t>(DIM_N), 512);
  CHECK_EQ(launch.Value<int32_t>(DIM_K), 256);
  CHECK_EQ(launch.Value<uint64_t>(PTR_EXPERTS), 0u);
  CHECK_EQ(launch.Value<int32_t>(DIM_L), 8);
  CHECK_EQ(launch.Value<int32_t>(DIM_GROUPS), 8);
  CHECK_EQ(launch.Value<int32_t>(DIM_ONE), 1);
  CHECK_EQ(launch.Value<int32_t>(DIM_D_ROWS), 1064);
  // The rest of a map is packed too, not only its first bytes.
  CHECK_EQ(launch.At<unsigned char>(127), 0xee);
  CHECK_EQ(launch.At<unsigned char>(383), 0xee);
}

TEST(DenseNMajorScaledF32) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  ForwardProblem p = DenseProblem(640, 384, 128, 4);
  p.b_major = N_MAJOR;
  p.d_element = F32;
  p.alpha = kAlpha;
  Run(ScaledKernels(), p, stream);

  const Launched& launch = fake.launched.at(0);
  CheckMap(fake.MapIn(launch, MAP_B), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kB, {384, 128, 4},
           {768, 98304}, {64, 64, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  CheckMap(fake.MapIn(launch, MAP_D), CU_TENSOR_MAP_DATA_TYPE_FLOAT32, kD - 32 * 1536,
           {384, 32, 672}, {1536, 1536}, {32, 32, 1}, CU_TENSOR_MAP_SWIZZLE_64B);
  CHECK_EQ(launch.Value<uint64_t>(PTR_ALPHA), kAlpha);
  CHECK_EQ(launch.Value<uint64_t>(PTR_PROB), 0u);

  p.alpha = 0;
  p.prob = kProb;
  LaunchForward(ScaledKernels(), p, stream);
  CHECK_EQ(fake.launched.at(1).Value<uint64_t>(PTR_ALPHA), 0u);
  CHECK_EQ(fake.launched.at(1).Value<uint64_t>(PTR_PROB), kProb);
}

TEST(GroupsMappedToExperts) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  ForwardProblem p = Mapped(DenseProblem(1000, 512, 256, 8), 3);
  Run(DenseKernels(), p, stream);
  const Launched& few = fake.launched.at(0);
  CHECK_EQ(few.Value<uint64_t>(PTR_EXPERTS), kExperts);
  CHECK_EQ(few.Value<int32_t>(DIM_L), 8);
  CHECK_EQ(few.Value<int32_t>(DIM_GROUPS), 3);
  CHECK_EQ(few.grid, 32u);  // (ceil(1000 / 256) + 3 + 1) * ceil(512 / 256) = 16 clusters of 2
  CHECK_EQ(fake.MapIn(few, MAP_B).dims, (U64{256, 512, 8}));
  // Experts may have several groups.
  p.groups = 20;
  LaunchForward(DenseKernels(), p, stream);
  CHECK_EQ(fake.launched.at(1).Value<int32_t>(DIM_GROUPS), 20);
  CHECK_EQ(fake.launched.at(1).grid, 100u);
  // Maps are the experts', not the groups'.
  Run(PointerKernels(), Dynamic(Mapped(PointerProblem(512, 256, 128, 300), 5)), stream);
  CHECK_EQ(fake.launched.at(2).Value<int32_t>(COUNT), 300);
  CHECK_EQ(fake.launched.at(3).Value<uint64_t>(PTR_EXPERTS), kExperts);
  CHECK_EQ(fake.launched.at(3).Value<uint64_t>(PTR_COUNTER), kScratch + 128 * 300);
}

TEST(Pointers) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const ForwardProblem p = PointerProblem(512, 256, 128, 300);
  Run(PointerKernels(), p, stream);

  CHECK_EQ(fake.launched.size(), 2u);
  const Launched& prologue = fake.launched.at(0);
  CHECK_EQ(prologue.kernel->name, "sm90_maps_from_memory");
  CHECK_EQ(prologue.grid, 3u);  // 300 experts, 128 threads
  CHECK_EQ(prologue.block, 128u);
  CHECK_EQ(prologue.cluster, 1u);
  CHECK_EQ(prologue.stream, stream);
  // The template: one expert, the forward kernel's box, A's address for the time being.
  CheckMap(fake.MapIn(prologue, MAP_B), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kA, {128, 256, 1},
           {256, 65536}, {64, 128, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
  CHECK_EQ(prologue.Value<uint64_t>(PTR_MAPS), kScratch);
  CHECK_EQ(prologue.Value<uint64_t>(PTR_POINTERS), kB);
  CHECK_EQ(prologue.Value<int32_t>(FIRST), 0);
  CHECK_EQ(prologue.Value<int32_t>(COUNT), 300);

  const Launched& forward = fake.launched.at(1);
  CHECK_EQ(forward.kernel->name, "sm90_pointers_bk_f16_scaled");
  CHECK_EQ(forward.Value<uint64_t>(PTR_MAPS), kScratch);
  CHECK_EQ(forward.cluster, 1u);
  CHECK_EQ(forward.grid, 60u);  // the device holds no more
  // This kernel's loads of A end at any row.
  const uint64_t span = uint64_t{1} << 30, wrapped = uint64_t{1} << 34;
  CheckMap(fake.MapIn(forward, MAP_A), CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kA,
           {128, span, 513, span + 1}, {256, 256, wrapped - 256}, {64, 128, 1, 1},
           CU_TENSOR_MAP_SWIZZLE_128B);
  CHECK_EQ(forward.Value<int32_t>(DIM_LOAD_ROWS), 513);
  CHECK_EQ(fake.MapIn(forward, MAP_D).type, CU_TENSOR_MAP_DATA_TYPE_FLOAT16);
  CHECK_EQ(fake.MapIn(forward, MAP_D).swizzle, CU_TENSOR_MAP_SWIZZLE_32B);
}

TEST(TupleInBatches) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  for (int64_t l : {1, 3, 4, 5, 8, 11}) {
    fake.launched.clear();
    std::vector<Address> addresses(l);
    for (int64_t i = 0; i < l; ++i) addresses[i] = kB + 4096 * i;
    ForwardProblem p = PointerProblem(512, 256, 128, l);
    p.weights = Weights::kTuple;
    p.b = 0;
    p.weight_addresses = addresses.data();
    Run(PointerKernels(), p, stream);

    // The fake prologue takes 4 addresses.
    const int64_t batches = (l + 3) / 4;
    CHECK_EQ(static_cast<int64_t>(fake.launched.size()), batches + 1);
    for (int64_t batch = 0; batch < batches; ++batch) {
      const Launched& prologue = fake.launched.at(batch);
      CHECK_EQ(prologue.kernel->name, "sm90_maps_by_value");
      CHECK_EQ(prologue.Value<int32_t>(FIRST), 4 * batch);
      CHECK_EQ(prologue.Value<int32_t>(COUNT), std::min<int64_t>(4, l - 4 * batch));
      CHECK_EQ(prologue.Value<uint64_t>(PTR_MAPS), kScratch);
      CHECK_EQ(prologue.grid, 1u);
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t expert = 4 * batch + i;
        CHECK_EQ(prologue.Value<uint64_t>(ADDRESS(i)), expert < l ? addresses[expert] : 0u);
      }
    }
    CHECK_EQ(fake.launched.back().kernel->kind, FORWARD);
  }
}

TEST(Blackwell) {
  for (int minor : {0, 3}) {
    FakeDriver fake;
    const CUstream stream = fake.AddDevice(10, minor);
    Run(DenseKernels(), DenseProblem(1000, 512, 256, 8), stream);
    const Launched& launch = fake.launched.at(0);
    CHECK_EQ(launch.kernel->name, "sm100_dense_bk_bf16_plain");
    CHECK_EQ(launch.cluster, 4u);
    CHECK_EQ(launch.grid, 4u * (4 + 9) * 2);  // a cluster covers 256 rows, 256 columns
    CHECK_EQ(fake.MapIn(launch, MAP_D).swizzle, CU_TENSOR_MAP_SWIZZLE_NONE);
  }
}

// Every shape against the formulas of docs/architecture.md, with arithmetic of its own.
TEST(ManyShapes) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LoadForward(DenseKernels(), Weights::kDense, stream);
  uint64_t random = 1;
  auto pick = [&random](uint64_t limit) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((random >> 33) % limit) + 1;
  };
  for (int i = 0; i < 2000; ++i) {
    const int64_t m = pick(i % 2 ? 300 : 2'000'000'000), n = 8 * pick(4000), k = 8 * pick(4000);
    const int64_t l = pick(i % 3 ? 16 : 1024);
    fake.encoded.clear();
    fake.launched.clear();
    LaunchForward(DenseKernels(), DenseProblem(m, n, k, l), stream);
    const Launched& launch = fake.launched.at(0);
    const __int128 ld = 2 * n, tiles = ((__int128{m} + 255) / 256 + l + 1) * ((n + 255) / 256);
    CHECK_EQ(launch.grid, tiles < 60 ? unsigned(2 * tiles) : 120u);
    CHECK_EQ(fake.MapIn(launch, MAP_A).dims, (U64{uint64_t(k), uint64_t(m)}));
    CHECK_EQ(fake.MapIn(launch, MAP_B).strides, (U64{2 * uint64_t(k), 2 * uint64_t(n) * k}));
    const EncodedMap& d = fake.MapIn(launch, MAP_D);
    CHECK_EQ(d.dims, (U64{uint64_t(n), 64, uint64_t(m) + 64}));
    // Row r is at x + y = r + X: the last row's address, seen from the shifted base.
    CHECK(__int128{d.address} + (m - 1 + 64) * ld == kD + (m - 1) * ld);
    CHECK_EQ(launch.Value<int32_t>(DIM_D_ROWS), m + 64);
  }
}

TEST(SizesPastThirtyTwoBits) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  Run(DenseKernels(), DenseProblem(1'000'000, 14336, 4096, 64), stream);
  const Launched& launch = fake.launched.at(0);
  CHECK_EQ(fake.MapIn(launch, MAP_B).dims, (U64{4096, 14336, 64}));
  CHECK_EQ(fake.MapIn(launch, MAP_B).strides, (U64{8192, 117440512}));
  // M * N = 1.4e10 elements.
  CHECK_EQ(fake.MapIn(launch, MAP_D).dims, (U64{14336, 64, 1'000'064}));
  CHECK_EQ(launch.grid, 120u);
}

TEST(Bias) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  for (Element element : {BF16, F16, F32}) {
    fake.launched.clear();
    Run(BiasKernels(), WithBias(DenseProblem(1000, 512, 256, 8), element), stream);
    const Launched& launch = fake.launched.at(0);
    CHECK_EQ(launch.kernel->name, "sm90_dense_bk_bf16_bias");
    CHECK_EQ(launch.Value<uint64_t>(PTR_BIAS), kBias);
    // As the kernels number them.
    CHECK_EQ(launch.Value<int32_t>(TYPE_BIAS), element == BF16 ? 1 : element == F16 ? 2 : 3);
  }
}

TEST(SixteenBitC) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  for (Element element : {BF16, F16}) {
    fake.launched.clear();
    Run(DenseCKernels(), WithC(DenseProblem(1000, 512, 256, 8), F32, element), stream);
    const Launched& launch = fake.launched.at(0);
    CheckMap(fake.MapIn(launch, MAP_D), CU_TENSOR_MAP_DATA_TYPE_FLOAT32, kD - 64 * 2048,
             {512, 64, 1064}, {2048, 2048}, {32, 64, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
    CheckMap(fake.MapIn(launch, MAP_C),
             element == F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             kC - 64 * 1024, {512, 64, 1064}, {1024, 1024}, {64, 64, 1},
             CU_TENSOR_MAP_SWIZZLE_128B);
    CHECK_EQ(launch.Value<int32_t>(TYPE_C), element == F16 ? 2 : 1);
    CHECK_EQ(launch.Value<int32_t>(DIM_D_ROWS), 1064);
    // Neither a bias nor a dynamic schedule.
    CHECK_EQ(launch.Value<uint64_t>(PTR_BIAS), 0u);
    CHECK_EQ(launch.Value<int32_t>(TYPE_BIAS), 0);
    CHECK_EQ(launch.Value<uint64_t>(PTR_COUNTER), 0u);
  }
}

TEST(SixteenBitDWithFloat32C) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  for (Element element : {BF16, F16}) {
    fake.launched.clear();
    const ForwardProblem p = WithC(PointerProblem(512, 256, 128, 3), element, F32);
    Run(PointerCKernels(), WithBias(p, F16), stream);
    const Launched& launch = fake.launched.at(1);
    CheckMap(fake.MapIn(launch, MAP_D),
             element == F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             kD - 32 * 512, {256, 32, 544}, {512, 512}, {64, 32, 1}, CU_TENSOR_MAP_SWIZZLE_128B);
    CheckMap(fake.MapIn(launch, MAP_C), CU_TENSOR_MAP_DATA_TYPE_FLOAT32, kC - 32 * 1024,
             {256, 32, 544}, {1024, 1024}, {32, 32, 1}, CU_TENSOR_MAP_SWIZZLE_64B);
    CHECK_EQ(launch.Value<int32_t>(TYPE_D), element == F16 ? 2 : 1);
    CHECK_EQ(launch.Value<int32_t>(TYPE_BIAS), 2);
    CHECK_EQ(launch.Value<uint64_t>(PTR_BIAS), kBias);
  }
}

void CheckCounter(const FakeDriver& fake, size_t memset, size_t launch, CUstream stream,
                  Address counter) {
  const Memset& reset = fake.memsets.at(memset);
  CHECK_EQ(reset.address, counter);
  CHECK_EQ(reset.value, 0u);
  CHECK_EQ(reset.count, 1u);
  CHECK_EQ(reset.stream, stream);
  CHECK(reset.launches_before <= launch);
  CHECK_EQ(fake.launched.at(launch).kernel->kind, FORWARD);
  CHECK_EQ(fake.launched.at(launch).stream, stream);
  CHECK_EQ(fake.launched.at(launch).Value<uint64_t>(PTR_COUNTER), counter);
}

TEST(DynamicSchedule) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const ForwardProblem dense = Dynamic(DenseProblem(1000, 512, 256, 8));
  Run(DenseKernels(), dense, stream);
  CheckCounter(fake, 0, 0, stream, kScratch);
  CHECK_EQ(fake.launched.at(0).grid, 52u);
  // Every call resets its own counter, also where a graph records it.
  const CUstream other = fake.AddStream(stream);
  fake.capturing.insert(other);
  LaunchForward(DenseKernels(), dense, other);
  CheckCounter(fake, 1, 1, other, kScratch);
  CHECK_EQ(fake.memsets.at(1).launches_before, 1u);
  CHECK(fake.illegal_under_capture.empty());
  fake.capturing.clear();
  // The counter lies behind the maps.
  Run(PointerKernels(), Dynamic(PointerProblem(512, 256, 128, 300)), stream);
  CheckCounter(fake, 2, 3, stream, kScratch + 128 * 300);
  CHECK_EQ(fake.launched.at(2).Value<uint64_t>(PTR_MAPS), kScratch);
  CHECK_EQ(fake.launched.at(3).Value<uint64_t>(PTR_MAPS), kScratch);
  // A static call has no counter.
  LaunchForward(PointerKernels(), PointerProblem(512, 256, 128, 300), stream);
  CHECK_EQ(fake.launched.at(5).Value<uint64_t>(PTR_COUNTER), 0u);
  CHECK_EQ(fake.memsets.size(), 3u);
}

TEST(OverlapMargin) {
  FakeDriver fake;
  const CUstream hopper = fake.AddDevice(9, 0), blackwell = fake.AddDevice(10, 0);
  ForwardProblem p = DenseProblem(100'000, 4096, 256, 8);
  LoadForward(DenseKernels(), Weights::kDense, hopper);
  LoadForward(DenseKernels(), Weights::kDense, blackwell);
  // 60 clusters fit, of 2 CTAs or of 4: a margin takes as many clusters as it touches.
  for (auto [margin, of_2, of_4] : {std::tuple{0u, 60u, 60u},
                                    {1u, 59u, 59u},
                                    {2u, 59u, 59u},
                                    {3u, 58u, 59u},
                                    {4u, 58u, 59u},
                                    {5u, 57u, 58u},
                                    {117u, 1u, 30u},
                                    {118u, 1u, 30u}}) {
    fake.launched.clear();
    p.overlap_margin = margin;
    LaunchForward(DenseKernels(), p, hopper);
    LaunchForward(DenseKernels(), p, blackwell);
    CHECK_EQ(fake.launched.at(0).grid, 2 * of_2);
    CHECK_EQ(fake.launched.at(1).grid, 4 * of_4);
  }
  // Fewer tiles than clusters: nothing to give up.
  p = DenseProblem(1000, 512, 256, 8);
  p.overlap_margin = 30;
  LaunchForward(DenseKernels(), p, hopper);
  CHECK_EQ(fake.launched.back().grid, 52u);
}

TEST(NothingToDo) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  LaunchForward(DenseKernels(), DenseProblem(0, 512, 256, 8), stream);
  LaunchForward(DenseKernels(), DenseProblem(1000, 0, 256, 8), stream);
  CHECK_EQ(fake.calls.size(), 0u);
}

TEST(CaptureIsCounted) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  const CUstream other = fake.AddStream(stream);
  const ForwardProblem p = DenseProblem(1000, 512, 256, 8);
  LoadForward(DenseKernels(), Weights::kDense, stream);
  fake.calls.clear();
  LaunchForward(DenseKernels(), p, stream);  // not counted: off
  CHECK_EQ(fake.calls["cuStreamIsCapturing"], 0);
  CountLaunches(true);
  LaunchForward(DenseKernels(), p, stream);
  fake.capturing.insert(other);
  LaunchForward(DenseKernels(), p, other);
  LaunchForward(DenseKernels(), p, other);
  CHECK_EQ(GetLaunchCounts().launches, 3);
  CHECK_EQ(GetLaunchCounts().captured, 2);
  CHECK(fake.illegal_under_capture.empty());
  CountLaunches(false);
  CHECK_EQ(GetLaunchCounts().launches, 0);
}

TEST(TableIsConsistent) {
  for (const Kernel& kernel : Kernels()) CHECK_EQ(Inconsistency(kernel), "");
  Kernel kernel = *FindKernel("sm90_dense_bk_bf16_plain");
  kernel.fields[3].size = 4;
  CHECK_CONTAINS(Inconsistency(kernel), "has 4 bytes, expected 8");
  kernel = *FindKernel("sm90_dense_bk_bf16_plain");
  kernel.fields[3].offset = 432;
  CHECK_CONTAINS(Inconsistency(kernel), "lies outside the parameters");
  kernel = *FindKernel("sm90_dense_bk_bf16_plain");
  kernel.param_bytes = 408;
  CHECK_CONTAINS(Inconsistency(kernel), "ends past 408");
  kernel = *FindKernel("sm90_dense_bk_bf16_plain");
  kernel.maps.pop_back();
  CHECK_CONTAINS(Inconsistency(kernel), "no map of rank 3 for field 2");
  kernel = *FindKernel("sm90_dense_bk_bf16_plain");
  kernel.maps.at(0).rank = 4;
  CHECK_CONTAINS(Inconsistency(kernel), "no map of rank 2 for field 0");
  kernel = *FindKernel("sm90_pointers_bk_f16_scaled");
  kernel.maps.at(0).rank = 2;
  CHECK_CONTAINS(Inconsistency(kernel), "no map of rank 4 for field 0");
  kernel = *FindKernel("sm90_dense_bk_bf16_plain");
  kernel.tile.m = 0;
  CHECK_CONTAINS(Inconsistency(kernel), "tile and cluster must be positive");
}

TEST(TableOfBiasAndCIsConsistent) {
  struct Case {
    const char* kernel;
    std::function<void(Kernel&)> spoil;
    std::string part;
  };
  auto drop = [](Field field) {
    return [field](Kernel& k) {
      k.fields.erase(std::find_if(k.fields.begin(), k.fields.end(),
                                  [field](const FieldSlot& slot) { return slot.field == field; }));
    };
  };
  const char* bias = "sm90_dense_bk_bf16_bias";
  const char* c16 = "sm90_dense_bk_f32_c_16bit";
  const char* d16 = "sm90_pointers_bk_16bit_c_f32";
  const std::vector<Case> cases = {
      {bias, drop(TYPE_BIAS), Text("field ", TYPE_BIAS, " and PTR_BIAS must come together")},
      {bias, drop(PTR_BIAS), Text("field ", TYPE_BIAS, " and PTR_BIAS must come together")},
      {bias, [](Kernel& k) { k.c_element = F32; },
       Text("field ", MAP_C, " and an element of C must come together")},
      {bias, [](Kernel& k) { k.d_element = k.maps[2].element = ANY16; },
       Text("field ", TYPE_D, " and a D of either 16-bit type must come together")},
      {c16, drop(MAP_C), Text("field ", MAP_C, " and an element of C must come together")},
      {c16, drop(TYPE_C),
       Text("field ", TYPE_C, " and a C of either 16-bit type must come together")},
      {c16, [](Kernel& k) { k.c_element = NONE; },
       Text("field ", MAP_C, " and an element of C must")},
      {c16, [](Kernel& k) { k.c_element = k.maps[3].element = F32; },
       Text("field ", TYPE_C, " and a C of either 16-bit type")},
      {c16, [](Kernel& k) { k.maps.pop_back(); }, Text("no map of rank 3 for field ", MAP_C)},
      {c16, [](Kernel& k) { k.maps[3].element = F16; },
       "map for field 3 has element 2, expected 4"},
      {c16, [](Kernel& k) { k.maps[3].box[1] = 32; }, "boxes of C and D differ in rows"},
      {d16, drop(TYPE_D),
       Text("field ", TYPE_D, " and a D of either 16-bit type must come together")},
      {d16, [](Kernel& k) { k.d_element = k.maps[2].element = F16; },
       Text("field ", TYPE_D, " and a D of either")},
      {d16, [](Kernel& k) { k.maps[2].element = F16; },
       "map for field 2 has element 2, expected 4"},
      {d16, [](Kernel& k) { k.maps[1].element = F16; },
       "map for field 1 has element 2, expected 1"},
      {d16, [](Kernel& k) { k.maps[0].element = F16; },
       "map for field 0 has element 2, expected 1"},
  };
  for (const Case& c : cases) {
    Kernel kernel = *FindKernel(c.kernel);
    c.spoil(kernel);
    CHECK_CONTAINS(Inconsistency(kernel), c.part);
  }
}

}  // namespace
}  // namespace jgg

TEST_MAIN
