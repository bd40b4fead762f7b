// What wgmma and tcgen05.mma share: operands in shared memory, and sums of products.

#ifndef MODEL_MATRIX_H_
#define MODEL_MATRIX_H_

#include <cstdint>
#include <vector>

#include "machine.h"

namespace model {

constexpr int kK = 16;  // of one instruction, for 16-bit elements

// PTX ISA 9.7.15.5.1.2.2, 9.7.16.4.1: a matrix of 16-bit elements in shared memory.
struct SharedMatrix {
  uint32_t start;            // address bits, within the CTA's window
  uint32_t leading, stride;  // byte offsets
  int swizzle;               // 1: 32 bytes, 2: 64, 3: 128
  bool mn_major;             // rows lie side by side, not the contraction
};
SharedMatrix WgmmaMatrix(uint64_t descriptor, bool mn_major);
SharedMatrix Tcgen05Matrix(uint64_t descriptor, bool mn_major);

// Rows [first, first + rows) by kK columns, row-major; checks order and initialization for every
// actor.
std::vector<uint16_t> Fetch(Cta& cta, const SharedMatrix& matrix, uint32_t first, uint32_t rows,
                            const std::vector<Actor>& actors);

// D (m, n) = A (m, kK) B (n, kK)^T + D, or without D. BF16 in, float32 out and in between, as the
// matrix unit of an H200 rounds: each product, and D, is cut to a multiple of 2^(e - 25), where e
// is the greatest exponent among them, a product's being the sum of its factors'; the sum is exact,
// and cut to 24 bits. Found by experiment; h200_matrix_unit.npz holds results. Of Blackwell's
// matrix unit this is not known.
void MultiplyAdd(const uint16_t* a, int m, const uint16_t* b, int n, float* d, bool add_d);

}  // namespace model

#endif  // MODEL_MATRIX_H_
