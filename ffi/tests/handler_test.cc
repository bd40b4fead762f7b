// The custom call as XLA makes it: stages, operands, attributes, traits.

#include "c_api.h"
#include "check.h"
#include "fake_driver.h"
#include "fake_xla.h"
#include "problems.h"

namespace jgg {
namespace {

std::map<std::string, FakeAttribute> Attributes(const char* kernels, const char* weights) {
  return {{"sm90", std::string("sm90_") + kernels},
          {"sm100", std::string("sm100_") + kernels},
          {"weights", std::string(weights)},
          {"b_major", std::string("k")},
          {"has_experts", false},
          {"has_alpha", false},
          {"has_prob", false},
          {"has_bias", false},
          {"has_c", false},
          {"dynamic", false},
          {"overlap_margin", int64_t{0}},
          {"n", int64_t{512}},
          {"l", int64_t{3}},
          {"build_id", std::string("fake-build")}};
}

// M = 1000, N = 512, K = 256, L = 3.
FakeCall DenseCall(CUstream stream) {
  return {stream,
          {{kBf16, {1000, 256}, kA}, {kS32, {3}, kOffsets}, {kBf16, {3, 512, 256}, kB}},
          {{kBf16, {1000, 512}, kD}},
          Attributes("dense_bk_bf16_plain", "dense")};
}

FakeCall PointerCall(CUstream stream) {
  FakeCall call = {stream,
                   {{kBf16, {1000, 256}, kA},
                    {kS32, {3}, kOffsets},
                    {kF32, {3}, kAlpha},
                    {kF32, {1000}, kProb},
                    {kS64, {3}, kB}},
                   {{kF16, {1000, 512}, kD}, {kU8, {384}, kScratch}},
                   Attributes("pointers_bk_f16_scaled", "pointers")};
  call.attributes["has_alpha"] = true;
  call.attributes["has_prob"] = true;
  return call;
}

FakeCall TupleCall(CUstream stream) {
  FakeCall call = PointerCall(stream);
  call.attributes["weights"] = std::string("tuple");
  call.args.pop_back();
  for (int i = 0; i < 3; ++i) call.args.push_back({kBf16, {512, 256}, kB + 0x1000 * i});
  return call;
}

// With every operand and result: alpha, prob, bias; d, c, scratch.
FakeCall FullCall(CUstream stream) {
  FakeCall call = TupleCall(stream);
  call.attributes["sm90"] = std::string("sm90_pointers_bk_16bit_c_f32");
  call.attributes["sm100"] = std::string("");
  call.attributes["has_bias"] = true;
  call.attributes["has_c"] = true;
  call.attributes["dynamic"] = true;
  call.args.insert(call.args.begin() + 4, {kBf16, {3, 512}, kBias});
  call.rets = {{kF16, {1000, 512}, kD}, {kF32, {1000, 512}, kC}, {kU8, {512}, kScratch}};
  return call;
}

// A call before execute has its attributes; operands may be missing or not there yet.
std::string Initialize(FakeCall call) {
  call.args.clear();
  call.rets.clear();
  return Call(jgg_forward_initialize, kInitialize, call);
}

TEST(ADenseCallThroughItsStages) {
  FakeDriver fake;
  const FakeCall call = DenseCall(fake.AddDevice(9, 0));
  CHECK_EQ(Call(jgg_forward_instantiate, kInstantiate, call), "");
  CHECK_EQ(fake.calls.size(), 0u);  // instantiate touches no device
  CHECK_EQ(Call(jgg_forward_initialize, kInitialize, call), "");
  CHECK_EQ(fake.loads.size(), 1u);
  CHECK_EQ(Call(jgg_forward_execute, kExecute, call), "");
  CHECK_EQ(fake.loads.size(), 1u);
  const Launched& launch = fake.launched.at(0);
  CHECK_EQ(launch.stream, call.stream);
  CHECK_EQ(launch.Value<int32_t>(DIM_M), 1000);
  CHECK_EQ(launch.Value<int32_t>(DIM_N), 512);
  CHECK_EQ(launch.Value<int32_t>(DIM_K), 256);
  CHECK_EQ(launch.Value<int32_t>(DIM_L), 3);
  CHECK_EQ(launch.Value<int32_t>(DIM_GROUPS), 3);
  CHECK_EQ(launch.Value<uint64_t>(PTR_EXPERTS), 0u);
  CHECK_EQ(launch.Value<uint64_t>(PTR_OFFSETS), kOffsets);
  CHECK_EQ(fake.MapIn(launch, MAP_A).address, kA);
  CHECK_EQ(fake.MapIn(launch, MAP_B).address, kB);
}

// FullCall with L = 3 weights for G = 5 groups.
FakeCall MappedCall(CUstream stream) {
  FakeCall call = FullCall(stream);
  call.attributes["has_experts"] = true;
  call.args[1].dims = {5};
  call.args[2].dims = {5};
  call.args[4].dims = {5, 512};
  call.args.insert(call.args.begin() + 2, {kS32, {5}, kExperts});
  return call;
}

TEST(GroupsMappedToExperts) {
  FakeDriver fake;
  const FakeCall call = MappedCall(fake.AddDevice(9, 0));
  CHECK_EQ(Call(jgg_forward_instantiate, kInstantiate, call), "");
  CHECK_EQ(Initialize(call), "");
  CHECK_EQ(Call(jgg_forward_execute, kExecute, call), "");
  CHECK_EQ(fake.launched.at(0).Value<int32_t>(COUNT), 3);
  const Launched& launch = fake.launched.at(1);
  CHECK_EQ(launch.Value<int32_t>(DIM_L), 3);
  CHECK_EQ(launch.Value<int32_t>(DIM_GROUPS), 5);
  CHECK_EQ(launch.Value<uint64_t>(PTR_OFFSETS), kOffsets);
  CHECK_EQ(launch.Value<uint64_t>(PTR_EXPERTS), kExperts);
  CHECK_EQ(launch.Value<uint64_t>(PTR_ALPHA), kAlpha);
  CHECK_EQ(launch.Value<uint64_t>(PTR_BIAS), kBias);
}

TEST(ExecuteUnderCapture) {
  FakeDriver fake;
  const FakeCall call = TupleCall(fake.AddDevice(9, 0));
  CHECK_EQ(Initialize(call), "");
  fake.capturing.insert(call.stream);
  CHECK_EQ(Call(jgg_forward_execute, kExecute, call), "");
  CHECK(fake.illegal_under_capture.empty());
  CHECK_EQ(fake.launched.size(), 2u);
}

TEST(NMajor) {
  FakeDriver fake;
  FakeCall call = DenseCall(fake.AddDevice(9, 0));
  call.attributes = Attributes("dense_bn_f32_scaled", "dense");
  call.attributes["b_major"] = std::string("n");
  call.args[2].dims = {3, 256, 512};
  call.rets[0].dtype = kF32;
  CHECK_EQ(Initialize(call), "");
  CHECK_EQ(Call(jgg_forward_execute, kExecute, call), "");
  CHECK_EQ(fake.MapIn(fake.launched.at(0), MAP_B).dims.at(0), 512u);
}

TEST(PointersAndTuples) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  FakeCall call = PointerCall(stream);
  CHECK_EQ(Initialize(call), "");
  CHECK_EQ(Call(jgg_forward_execute, kExecute, call), "");
  call.args.back() = {kU8, {24}, kB};  // int64 as bytes, where JAX has no int64
  CHECK_EQ(Call(jgg_forward_execute, kExecute, call), "");
  call = TupleCall(stream);
  CHECK_EQ(Initialize(call), "");
  CHECK_EQ(Call(jgg_forward_execute, kExecute, call), "");
  CHECK_EQ(fake.launched.size(), 6u);
  CHECK_EQ(fake.launched.at(2).Value<uint64_t>(PTR_POINTERS), kB);
  CHECK_EQ(fake.launched.at(3).Value<uint64_t>(PTR_ALPHA), kAlpha);
  CHECK_EQ(fake.launched.at(3).Value<uint64_t>(PTR_PROB), kProb);
  CHECK_EQ(fake.launched.at(4).Value<uint64_t>(ADDRESS(2)), kB + 0x2000);
}

TEST(BiasAndC) {
  FakeDriver fake;
  const FakeCall call = FullCall(fake.AddDevice(9, 0));
  CHECK_EQ(Call(jgg_forward_instantiate, kInstantiate, call), "");
  CHECK_EQ(Initialize(call), "");
  CHECK_EQ(Call(jgg_forward_execute, kExecute, call), "");
  CHECK_EQ(fake.launched.at(0).Value<uint64_t>(ADDRESS(2)), kB + 0x2000);
  const Launched& launch = fake.launched.at(1);
  CHECK_EQ(launch.Value<uint64_t>(PTR_ALPHA), kAlpha);
  CHECK_EQ(launch.Value<uint64_t>(PTR_PROB), kProb);
  CHECK_EQ(launch.Value<uint64_t>(PTR_BIAS), kBias);
  CHECK_EQ(launch.Value<int32_t>(TYPE_BIAS), BF16);
  CHECK_EQ(launch.Value<int32_t>(TYPE_D), F16);
  CHECK_EQ(launch.Value<uint64_t>(PTR_MAPS), kScratch);
  CHECK_EQ(launch.Value<uint64_t>(PTR_COUNTER), kScratch + 384);
  CHECK_EQ(fake.MapIn(launch, MAP_D).address, kD - 32 * 1024);
  CHECK_EQ(fake.MapIn(launch, MAP_C).address, kC - 32 * 2048);
  CHECK_EQ(fake.memsets.at(0).address, kScratch + 384);
}

TEST(BiasAlone) {
  FakeDriver fake;
  FakeCall call = DenseCall(fake.AddDevice(9, 0));
  call.attributes["sm90"] = std::string("sm90_dense_bk_bf16_bias");
  call.attributes["sm100"] = std::string("");
  call.attributes["has_bias"] = true;
  CHECK_EQ(Initialize(call), "");
  for (auto [dtype, element] : {std::pair{kBf16, BF16}, {kF16, F16}, {kF32, F32}}) {
    fake.launched.clear();
    FakeCall biased = call;
    biased.args.insert(biased.args.begin() + 2, {dtype, {3, 512}, kBias});
    CHECK_EQ(Call(jgg_forward_execute, kExecute, biased), "");
    CHECK_EQ(fake.launched.at(0).Value<uint64_t>(PTR_BIAS), kBias);
    CHECK_EQ(fake.launched.at(0).Value<int32_t>(TYPE_BIAS), element);
  }
}

TEST(CAlone) {
  FakeDriver fake;
  FakeCall call = DenseCall(fake.AddDevice(9, 0));
  call.attributes["sm90"] = std::string("sm90_dense_bk_f32_c_16bit");
  call.attributes["sm100"] = std::string("");
  call.attributes["has_c"] = true;
  CHECK_EQ(Initialize(call), "");
  for (auto [dtype, element] : {std::pair{kBf16, BF16}, {kF16, F16}}) {
    fake.launched.clear();
    call.rets = {{kF32, {1000, 512}, kD}, {dtype, {1000, 512}, kC}};
    CHECK_EQ(Call(jgg_forward_execute, kExecute, call), "");
    CHECK_EQ(fake.launched.at(0).Value<int32_t>(TYPE_C), element);
    CHECK_EQ(fake.MapIn(fake.launched.at(0), MAP_C).address, kC - 64 * 1024);
  }
}

TEST(DynamicSchedule) {
  FakeDriver fake;
  FakeCall call = DenseCall(fake.AddDevice(9, 0));
  CHECK_EQ(Initialize(call), "");
  call.attributes["dynamic"] = true;
  call.rets.push_back({kU8, {128}, kScratch});
  fake.capturing.insert(call.stream);
  CHECK_EQ(Call(jgg_forward_execute, kExecute, call), "");
  CHECK(fake.illegal_under_capture.empty());
  CHECK_EQ(fake.memsets.at(0).address, kScratch);
  CHECK_EQ(fake.launched.at(0).Value<uint64_t>(PTR_COUNTER), kScratch);
}

TEST(OverlapMargin) {
  FakeDriver fake;
  fake.max_clusters = 10;
  FakeCall call = DenseCall(fake.AddDevice(9, 0));
  CHECK_EQ(Initialize(call), "");
  call.attributes["overlap_margin"] = int64_t{7};
  CHECK_EQ(Call(jgg_forward_execute, kExecute, call), "");
  CHECK_EQ(fake.launched.at(0).grid, 12u);
  call.attributes["overlap_margin"] = int64_t{19};
  CHECK_CONTAINS(Call(jgg_forward_execute, kExecute, call),
                 "3: jax_grouped_gemm: overlap_margin must be between 0 and 18 SMs");
}

TEST(KernelsOfOneArchitecture) {
  FakeDriver fake;
  FakeCall call = DenseCall(fake.AddDevice(10, 0));
  call.attributes["sm100"] = std::string("");
  CHECK_EQ(Call(jgg_forward_instantiate, kInstantiate, call), "");
  CHECK_CONTAINS(Initialize(call), "9: jax_grouped_gemm: the program has no kernel for device 0");
  call.attributes["sm90"] = std::string("");
  CHECK_CONTAINS(Call(jgg_forward_instantiate, kInstantiate, call), "got neither");
}

TEST(EmptyResults) {
  FakeDriver fake;
  FakeCall call = DenseCall(fake.AddDevice(9, 0));
  call.args[0] = {kBf16, {0, 256}, 0};
  call.rets[0] = {kBf16, {0, 512}, 0};
  CHECK_EQ(Call(jgg_forward_execute, kExecute, call), "");
  CHECK_EQ(fake.launched.size(), 0u);
}

TEST(AnotherBuildIsRefused) {
  FakeCall call = DenseCall(nullptr);
  call.attributes["build_id"] = std::string("older-build");
  const std::string error = Call(jgg_forward_instantiate, kInstantiate, call);
  CHECK_CONTAINS(error, "9: jax_grouped_gemm: the program was lowered for build older-build");
  CHECK_CONTAINS(error, "fake-build");
  call = DenseCall(nullptr);
  call.attributes["sm100"] = std::string("sm100_gone");
  CHECK_CONTAINS(Call(jgg_forward_instantiate, kInstantiate, call),
                 "no forward kernel 'sm100_gone' for sm_100: the program was lowered for another");
  call = DenseCall(nullptr);
  call.attributes["weights"] = std::string("sparse");
  CHECK_CONTAINS(Call(jgg_forward_instantiate, kInstantiate, call), "got 'sparse'");
  call = DenseCall(nullptr);
  call.attributes["n"] = std::string("512");
  CHECK_CONTAINS(Call(jgg_forward_instantiate, kInstantiate, call), "Wrong attribute type");
  call = DenseCall(nullptr);
  call.attributes.erase("n");
  CHECK_CONTAINS(Call(jgg_forward_instantiate, kInstantiate, call), "Wrong number of attributes");
}

TEST(DriverErrorsReachXla) {
  FakeDriver fake;
  FakeCall call = DenseCall(fake.AddDevice(8, 0));
  CHECK_CONTAINS(Initialize(call), "9: jax_grouped_gemm: no kernel for device 0");
  call = DenseCall(fake.AddDevice(9, 0));
  fake.FailAt("cuModuleLoadData");
  CHECK_CONTAINS(Initialize(call), "13: jax_grouped_gemm: cuModuleLoadData failed");
}

TEST(WrongOperands) {
  FakeDriver fake;
  const CUstream stream = fake.AddDevice(9, 0);
  CHECK_EQ(Initialize(DenseCall(stream)), "");
  CHECK_EQ(Initialize(TupleCall(stream)), "");
  const std::vector<Refusal> dense = {
      {[](FakeCall& c) { c.args[0].dtype = kF32; },
       "3: jax_grouped_gemm: a must be BF16 (M, K) = (1000, 256); got F32 (1000, 256)"},
      {[](FakeCall& c) { c.args[0].dims = {1000}; }, "a must be BF16 (M, K); got BF16 (1000)"},
      {[](FakeCall& c) { c.args[1].dtype = kS64; }, "offsets must be S32 (L,) = (3); got S64 (3)"},
      {[](FakeCall& c) { c.args[1].dims = {1, 3}; }, "offsets must be S32 (L,); got S32 (1, 3)"},
      {[](FakeCall& c) { c.args[1].dims = {4}; }, "offsets must be S32 (L,) = (3); got S32 (4)"},
      {[](FakeCall& c) { c.attributes["l"] = int64_t{4}; }, "offsets must be S32 (L,) = (4)"},
      {[](FakeCall& c) { c.attributes["l"] = int64_t{-1}; }, "offsets must be S32 (L,) = (-1)"},
      {[](FakeCall& c) { c.attributes["has_experts"] = true; }, "must have 4 operands"},
      {[](FakeCall& c) { c.args[2].dims = {3, 512, 128}; },
       "b must be BF16 (L, N, K) = (3, 512, 256); got BF16 (3, 512, 128)"},
      {[](FakeCall& c) { c.args[2].dtype = kF16; }, "got F16 (3, 512, 256)"},
      {[](FakeCall& c) { c.attributes["b_major"] = std::string("n"); },
       "b must be BF16 (L, K, N) = (3, 256, 512)"},
      {[](FakeCall& c) { c.attributes["n"] = int64_t{256}; }, "b must be BF16 (L, N, K) = (3, 256"},
      {[](FakeCall& c) { c.rets[0].dims = {1000, 256}; },
       "d must be BF16 (M, N) = (1000, 512); got BF16 (1000, 256)"},
      {[](FakeCall& c) { c.rets[0].dtype = kS32; }, "d must be BF16, F16 or F32 (M, N); got S32"},
      {[](FakeCall& c) { c.rets[0].dtype = kF32; }, "does not write d in this dtype"},
      {[](FakeCall& c) { c.args.pop_back(); }, "must have 3 operands for its attributes; got 2"},
      {[](FakeCall& c) { c.args.clear(); }, "must have 3 operands for its attributes; got 0"},
      {[](FakeCall& c) { c.args.push_back(c.args[0]); }, "must have 3 operands"},
      {[](FakeCall& c) { c.rets.clear(); }, "must have 1 results for its attributes; got 0"},
      {[](FakeCall& c) { c.attributes["has_prob"] = true; }, "must have 4 operands"},
  };
  CheckRefusals(jgg_forward_execute, kExecute, DenseCall(stream), dense);
  const std::vector<Refusal> tuple = {
      {[](FakeCall& c) { c.args[2].dims = {4}; }, "alpha must be F32 (L,) = (3); got F32 (4)"},
      {[](FakeCall& c) { c.args[3].dtype = kBf16; }, "prob must be F32 (M,) = (1000); got BF16"},
      {[](FakeCall& c) { c.args[5].dims = {256, 512}; },
       "each array of b must be BF16 (N, K) = (512, 256); got BF16 (256, 512)"},
      {[](FakeCall& c) { c.args.pop_back(); }, "must have 7 operands for its attributes; got 6"},
      {[](FakeCall& c) { c.rets[1].dims = {128}; },
       "scratch must be U8 (128 L,) = (384); got U8 (128)"},
      {[](FakeCall& c) { c.rets.pop_back(); }, "must have 2 results"},
  };
  CheckRefusals(jgg_forward_execute, kExecute, TupleCall(stream), tuple);
  const std::vector<Refusal> full = {
      {[](FakeCall& c) { c.args[4].dims = {3, 256}; },
       "3: jax_grouped_gemm: bias must be BF16 (L, N) = (3, 512); got BF16 (3, 256)"},
      {[](FakeCall& c) { c.args[4].dims = {512, 3}; }, "(3, 512); got BF16 (512, 3)"},
      {[](FakeCall& c) { c.args[4].dtype = kS32; },
       "bias must be BF16, F16 or F32 (L, N); got S32 (3, 512)"},
      {[](FakeCall& c) { c.args.erase(c.args.begin() + 4); }, "must have 8 operands"},
      {[](FakeCall& c) { c.attributes["has_bias"] = false; }, "must have 7 operands"},
      {[](FakeCall& c) { c.rets[1].dims = {1000, 256}; },
       "c must be F32 (M, N) = (1000, 512); got F32 (1000, 256)"},
      {[](FakeCall& c) { c.rets[1].dtype = kS32; }, "c must be BF16, F16 or F32 (M, N); got S32"},
      {[](FakeCall& c) { c.rets[1].dtype = kBf16; }, "does not write c in this dtype"},
      {[](FakeCall& c) { c.rets[0].dtype = kF32; }, "does not write d in this dtype"},
      {[](FakeCall& c) { c.rets.erase(c.rets.begin() + 1); },
       "must have 3 results for its attributes; got 2"},
      {[](FakeCall& c) { c.attributes["has_c"] = false; }, "must have 2 results"},
      {[](FakeCall& c) { c.rets[2].dims = {384}; },
       "scratch must be U8 (128 L + 128,) = (512); got U8 (384)"},
      {[](FakeCall& c) { c.attributes["dynamic"] = false; },
       "scratch must be U8 (128 L,) = (384); got U8 (512)"},
  };
  CheckRefusals(jgg_forward_execute, kExecute, FullCall(stream), full);
  const std::vector<Refusal> mapped = {
      {[](FakeCall& c) { c.args[1].dims = {1, 5}; }, "offsets must be S32 (G,); got S32 (1, 5)"},
      {[](FakeCall& c) { c.args[1].dtype = kS64; }, "offsets must be S32 (G,) = (5); got S64 (5)"},
      {[](FakeCall& c) { c.args[2].dims = {3}; },
       "3: jax_grouped_gemm: experts must be S32 (G,) = (5); got S32 (3)"},
      {[](FakeCall& c) { c.args[2].dtype = kF32; }, "experts must be S32 (G,) = (5); got F32 (5)"},
      {[](FakeCall& c) { c.args[3].dims = {3}; }, "alpha must be F32 (G,) = (5); got F32 (3)"},
      {[](FakeCall& c) { c.args[5].dims = {3, 512}; },
       "bias must be BF16 (G, N) = (5, 512); got BF16 (3, 512)"},
      {[](FakeCall& c) { c.attributes["l"] = int64_t{5}; }, "must have 11 operands"},
      {[](FakeCall& c) { c.attributes["l"] = int64_t{-1}; }, "operands for its attributes; got 9"},
      {[](FakeCall& c) { c.attributes["has_experts"] = false; }, "must have 8 operands"},
  };
  CheckRefusals(jgg_forward_execute, kExecute, MappedCall(stream), mapped);
  FakeCall dynamic = DenseCall(stream);
  dynamic.attributes["dynamic"] = true;
  CHECK_CONTAINS(Call(jgg_forward_execute, kExecute, dynamic), "must have 2 results");
  dynamic.rets.push_back({kU8, {512}, kScratch});
  CHECK_CONTAINS(Call(jgg_forward_execute, kExecute, dynamic),
                 "scratch must be U8 (128,) = (128); got U8 (512)");
  FakeCall pointers = PointerCall(stream);
  pointers.args.back().dims = {2};
  CHECK_CONTAINS(Call(jgg_forward_execute, kExecute, pointers),
                 "b_ptrs must be S64 (L,) = (3,) or U8 (8 L,) = (24,); got S64 (2)");
  CHECK_EQ(fake.launched.size(), 0u);
}

TEST(Traits) {
  const XLA_FFI_Metadata execute = MetadataOf(jgg_forward_execute);
  CHECK_EQ(execute.traits, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
  int major = -1, minor = -1;
  jgg_ffi_api_version(&major, &minor);
  CHECK_EQ(execute.api_version.major_version, major);
  CHECK_EQ(execute.api_version.minor_version, minor);
  CHECK_EQ(MetadataOf(jgg_gather_weights).traits, 0u);
}

TEST(GatherWeights) {
  const std::vector<uint16_t> first = {1, 2, 3, 4, 5, 6}, second = {7, 8, 9, 10, 11, 12};
  std::vector<uint16_t> gathered(12);
  uint64_t addresses[2] = {reinterpret_cast<uint64_t>(first.data()),
                           reinterpret_cast<uint64_t>(second.data())};
  int32_t ends[2] = {1, 5};
  const auto out = reinterpret_cast<uint64_t>(gathered.data());
  FakeCall call = {nullptr,
                   {{kS64, {2}, reinterpret_cast<uint64_t>(addresses)},
                    {kS32, {2}, reinterpret_cast<uint64_t>(ends)}},
                   {{kBf16, {2, 3, 2}, out}},
                   {{"m", int64_t{5}}}};
  CHECK_EQ(Call(jgg_gather_weights, kExecute, call), "");
  for (int i = 0; i < 12; ++i) CHECK_EQ(gathered[i], i + 1);
  call.args[0].dims = {3};
  CHECK_CONTAINS(Call(jgg_gather_weights, kExecute, call), "b_ptrs must be S64 (L,) = (2,)");
  call.args[0].dims = {2};
  addresses[1] = 0;
  CHECK_CONTAINS(Call(jgg_gather_weights, kExecute, call), "b_ptrs[1] must be the address");
  ends[1] = 1;  // no rows: no address is needed
  CHECK_EQ(Call(jgg_gather_weights, kExecute, call), "");
  for (int i = 0; i < 12; ++i) CHECK_EQ(gathered[i], i < 6 ? i + 1 : 0);
  call.args[1].dims = {1};
  CHECK_CONTAINS(Call(jgg_gather_weights, kExecute, call), "offsets must be S32 (L,) = (2)");
}

}  // namespace
}  // namespace jgg

TEST_MAIN
