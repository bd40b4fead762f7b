// Calls that fit the fake table. The addresses are never read.

#ifndef JGG_TESTS_PROBLEMS_H_
#define JGG_TESTS_PROBLEMS_H_

#include "launch.h"

namespace jgg {

constexpr Address kA = 0x7f0000000100, kB = 0x7f1000000100, kD = 0x7f8000000100;
constexpr Address kOffsets = 0x7f2000000004, kAlpha = 0x7f3000000004, kProb = 0x7f4000000004;
constexpr Address kScratch = 0x7f5000000080;

inline ForwardKernels DenseKernels() {
  return FindForwardKernels("sm90_dense_bk_bf16_plain", "sm100_dense_bk_bf16_plain");
}

inline ForwardKernels ScaledKernels() {
  return FindForwardKernels("sm90_dense_bn_f32_scaled", "sm100_dense_bn_f32_scaled");
}

inline ForwardKernels PointerKernels() {
  return FindForwardKernels("sm90_pointers_bk_f16_scaled", "sm100_pointers_bk_f16_scaled");
}

inline Problem DenseProblem(int64_t m, int64_t n, int64_t k, int64_t l) {
  Problem p;
  p.m = m;
  p.n = n;
  p.k = k;
  p.l = l;
  p.a = kA;
  p.b = kB;
  p.offsets = kOffsets;
  p.d = kD;
  return p;
}

inline Problem PointerProblem(int64_t m, int64_t n, int64_t k, int64_t l) {
  Problem p = DenseProblem(m, n, k, l);
  p.weights = Weights::kPointers;
  p.d_element = F16;
  p.scratch = kScratch;
  return p;
}

}  // namespace jgg

#endif  // JGG_TESTS_PROBLEMS_H_
