// Calls that fit the fake table. The addresses are never read.

#ifndef JGG_TESTS_PROBLEMS_H_
#define JGG_TESTS_PROBLEMS_H_

#include "launch.h"

namespace jgg {

constexpr Address kA = 0x7f0000000100, kB = 0x7f1000000100, kD = 0x7f8000000100;
constexpr Address kOffsets = 0x7f2000000004, kAlpha = 0x7f3000000004, kProb = 0x7f4000000004;
constexpr Address kExperts = 0x7fa000000004;
constexpr Address kBias = 0x7f6000000004, kC = 0x7f9000000100;
constexpr Address kX = kA, kY = kB;
constexpr Address kScratch = 0x7f5000000080;

inline CallKernels DenseKernels() {
  return FindKernels(FORWARD, "sm90_dense_bk_bf16_plain", "sm100_dense_bk_bf16_plain");
}

inline CallKernels ScaledKernels() {
  return FindKernels(FORWARD, "sm90_dense_bn_f32_scaled", "sm100_dense_bn_f32_scaled");
}

inline CallKernels PointerKernels() {
  return FindKernels(FORWARD, "sm90_pointers_bk_f16_scaled", "sm100_pointers_bk_f16_scaled");
}

// Kernels of one architecture only.
inline CallKernels BiasKernels() { return FindKernels(FORWARD, "sm90_dense_bk_bf16_bias", ""); }

inline CallKernels DenseCKernels() { return FindKernels(FORWARD, "sm90_dense_bk_f32_c_16bit", ""); }

inline CallKernels PointerCKernels() {
  return FindKernels(FORWARD, "sm90_pointers_bk_16bit_c_f32", "");
}

inline ForwardProblem DenseProblem(int64_t m, int64_t n, int64_t k, int64_t l) {
  ForwardProblem p;
  p.m = m;
  p.n = n;
  p.k = k;
  p.l = p.groups = l;
  p.a = kA;
  p.b = kB;
  p.offsets = kOffsets;
  p.d = kD;
  return p;
}

inline ForwardProblem PointerProblem(int64_t m, int64_t n, int64_t k, int64_t l) {
  ForwardProblem p = DenseProblem(m, n, k, l);
  p.weights = Weights::kPointers;
  p.d_element = F16;
  p.scratch = kScratch;
  return p;
}

inline CallKernels WgradKernels() {
  return FindKernels(WGRAD, "sm90_wgrad_bf16", "sm100_wgrad_bf16");
}

inline CallKernels AccumulateKernels() {
  return FindKernels(WGRAD, "sm90_wgrad_f32_accumulate", "sm100_wgrad_f32_accumulate");
}

inline WgradProblem MakeWgradProblem(int64_t m, int64_t n, int64_t k, int64_t l) {
  WgradProblem p;
  p.m = m;
  p.n = n;
  p.k = k;
  p.l = p.groups = l;
  p.x = kX;
  p.y = kY;
  p.offsets = kOffsets;
  p.d = kD;
  return p;
}

// For AccumulateKernels().
inline WgradProblem AccumulateProblem(int64_t m, int64_t n, int64_t k, int64_t l) {
  WgradProblem p = MakeWgradProblem(m, n, k, l);
  p.d_element = F32;
  p.accumulate = true;
  return p;
}

// `p` with more operands.

template <typename AnyProblem>
AnyProblem Mapped(AnyProblem p, int64_t groups) {
  p.groups = groups;
  p.experts = kExperts;
  return p;
}

inline ForwardProblem WithBias(ForwardProblem p, Element element) {
  p.bias = kBias;
  p.bias_element = element;
  return p;
}

inline ForwardProblem WithC(ForwardProblem p, Element d_element, Element c_element) {
  p.d_element = d_element;
  p.c = kC;
  p.c_element = c_element;
  return p;
}

template <typename AnyProblem>
AnyProblem Dynamic(AnyProblem p) {
  p.dynamic = true;
  p.scratch = kScratch;
  return p;
}

}  // namespace jgg

#endif  // JGG_TESTS_PROBLEMS_H_
