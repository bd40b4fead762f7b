// The custom call "jax_grouped_gemm_forward": one function per stage. Operands, results and
// attributes are listed in docs/architecture.md.

#include <string_view>
#include <vector>

#include "c_api.h"
#include "launch.h"
#include "xla_border.h"

namespace jgg {

namespace ffi = xla::ffi;

struct ForwardAttributes {
  std::string_view sm90;
  std::string_view sm100;
  std::string_view weights;
  std::string_view b_major;
  bool has_experts;
  bool has_alpha;
  bool has_prob;
  bool has_bias;
  bool has_c;
  bool dynamic;
  int64_t overlap_margin;
  int64_t n;
  int64_t l;
  std::string_view build_id;
};

namespace {

// Of what the kernels write or add.
constexpr std::initializer_list<ffi::DataType> kFloats = {ffi::BF16, ffi::F16, ffi::F32};

// A problem and what it points to.
struct DecodedCall {
  ForwardProblem problem;
  std::vector<Address> weight_addresses;
};

DecodedCall Decode(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                   const ForwardAttributes& attributes) {
  auto operand = [&args](size_t i) { return Operand(args, i); };
  auto result = [&rets](size_t i) { return ResultOf(rets, i); };

  DecodedCall call;
  ForwardProblem& p = call.problem;
  p.weights = ParseWeights(attributes.weights);
  p.b_major = ParseMajor(attributes.b_major);
  const bool dense = p.weights == Weights::kDense;
  const bool tuple = p.weights == Weights::kTuple;
  p.dynamic = attributes.dynamic;
  p.overlap_margin = attributes.overlap_margin;
  const bool has_scratch = !dense || p.dynamic;
  const size_t first_weight =
      2 + attributes.has_experts + attributes.has_alpha + attributes.has_prob + attributes.has_bias;
  if (args.size() < first_weight) ExpectCount("operands", args.size(), first_weight + 1);
  ExpectCount("results", rets.size(), 1 + attributes.has_c + has_scratch);

  // Without experts, group g is expert g's.
  const char* per_group = attributes.has_experts ? "(G,)" : "(L,)";
  const ffi::AnyBuffer a = operand(0);
  const ffi::AnyBuffer offsets = operand(1);
  if (a.dimensions().size() != 2) Mismatch(a, "a", "BF16 (M, K)");
  if (offsets.dimensions().size() != 1) Mismatch(offsets, "offsets", Text("S32 ", per_group));
  p.m = a.dimensions()[0];
  p.k = a.dimensions()[1];
  p.n = attributes.n;
  p.l = attributes.l;
  p.groups = attributes.has_experts ? offsets.dimensions()[0] : p.l;
  ExpectCount("operands", args.size(), first_weight + (tuple ? static_cast<size_t>(p.l) : 1));

  p.a = Expect(a, "a", ffi::BF16, "(M, K)", {p.m, p.k});
  p.offsets = Expect(offsets, "offsets", ffi::S32, per_group, {p.groups});
  size_t next = 2;
  if (attributes.has_experts) {
    p.experts = Expect(operand(next++), "experts", ffi::S32, per_group, {p.groups});
  }
  if (attributes.has_alpha) {
    p.alpha = Expect(operand(next++), "alpha", ffi::F32, per_group, {p.groups});
  }
  if (attributes.has_prob) p.prob = Expect(operand(next++), "prob", ffi::F32, "(M,)", {p.m});
  if (attributes.has_bias) {
    const char* axes = attributes.has_experts ? "(G, N)" : "(L, N)";
    p.bias = ExpectOneOf(operand(next++), "bias", kFloats, axes, {p.groups, p.n}, &p.bias_element);
  }

  const bool k_major = p.b_major == K_MAJOR;
  const char* axes =
      dense ? (k_major ? "(L, N, K)" : "(L, K, N)") : (k_major ? "(N, K)" : "(K, N)");
  const int64_t rows = k_major ? p.n : p.k;
  const int64_t columns = k_major ? p.k : p.n;
  if (dense) p.b = Expect(operand(next), "b", ffi::BF16, axes, {p.l, rows, columns});
  if (p.weights == Weights::kPointers) p.b = ExpectPointers(operand(next), p.l);
  if (tuple) {
    call.weight_addresses.reserve(p.l);
    for (int64_t i = 0; i < p.l; ++i) {
      call.weight_addresses.push_back(
          Expect(operand(next + i), "each array of b", ffi::BF16, axes, {rows, columns}));
    }
    p.weight_addresses = call.weight_addresses.data();
  }

  p.d = ExpectOneOf(result(0), "d", kFloats, "(M, N)", {p.m, p.n}, &p.d_element);
  if (attributes.has_c) {
    p.c = ExpectOneOf(result(1), "c", kFloats, "(M, N)", {p.m, p.n}, &p.c_element);
  }
  if (has_scratch) {
    const char* bytes = dense ? "(128,)" : p.dynamic ? "(128 L + 128,)" : "(128 L,)";
    p.scratch = Expect(result(rets.size() - 1), "scratch", ffi::U8, bytes, {p.ScratchBytes()});
  }
  return call;
}

CallKernels KernelsOf(const ForwardAttributes& attributes) {
  return FindKernels(FORWARD, attributes.sm90, attributes.sm100);
}

ffi::Error Instantiate(ffi::RemainingArgs, ffi::RemainingRets, ForwardAttributes attributes) {
  return AtBorder([&] {
    ExpectBuild(attributes.build_id);
    KernelsOf(attributes);
    ParseWeights(attributes.weights);
    ParseMajor(attributes.b_major);
  });
}

ffi::Error Initialize(CUstream stream, ffi::RemainingArgs, ffi::RemainingRets,
                      ForwardAttributes attributes) {
  return AtBorder(
      [&] { LoadForward(KernelsOf(attributes), ParseWeights(attributes.weights), stream); });
}

ffi::Error Execute(CUstream stream, ffi::RemainingArgs args, ffi::RemainingRets rets,
                   ForwardAttributes attributes) {
  return AtBorder([&] {
    const DecodedCall call = Decode(args, rets, attributes);
    LaunchForward(KernelsOf(attributes), call.problem, stream);
  });
}

}  // namespace
}  // namespace jgg

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    jgg::ForwardAttributes, xla::ffi::StructMember<std::string_view>("sm90"),
    xla::ffi::StructMember<std::string_view>("sm100"),
    xla::ffi::StructMember<std::string_view>("weights"),
    xla::ffi::StructMember<std::string_view>("b_major"),
    xla::ffi::StructMember<bool>("has_experts"), xla::ffi::StructMember<bool>("has_alpha"),
    xla::ffi::StructMember<bool>("has_prob"), xla::ffi::StructMember<bool>("has_bias"),
    xla::ffi::StructMember<bool>("has_c"), xla::ffi::StructMember<bool>("dynamic"),
    xla::ffi::StructMember<int64_t>("overlap_margin"), xla::ffi::StructMember<int64_t>("n"),
    xla::ffi::StructMember<int64_t>("l"), xla::ffi::StructMember<std::string_view>("build_id"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(jgg_forward_instantiate, jgg::Instantiate,
                              jgg::BindInstantiate<jgg::ForwardAttributes>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jgg_forward_initialize, jgg::Initialize,
    (jgg::BindOnStream<jgg::ForwardAttributes, xla::ffi::ExecutionStage::kInitialize>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jgg_forward_execute, jgg::Execute,
    (jgg::BindOnStream<jgg::ForwardAttributes, xla::ffi::ExecutionStage::kExecute>()),
    {xla::ffi::Traits::kCmdBufferCompatible});

void jgg_ffi_api_version(int* major, int* minor) {
  *major = XLA_FFI_API_MAJOR;
  *minor = XLA_FFI_API_MINOR;
}
