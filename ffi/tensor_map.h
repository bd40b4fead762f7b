// Tensor maps of the operands: views of them that the copy engine understands.

#ifndef JGG_TENSOR_MAP_H_
#define JGG_TENSOR_MAP_H_

#include <cstdint>

#include "device.h"
#include "problem.h"

namespace jgg {

// A strided view, innermost dimension first. The innermost stride is one element.
struct TensorView {
  const char* name;  // for errors
  Element element;
  Address base;
  uint32_t rank;
  uint64_t dims[5];
  uint64_t strides[4];  // bytes, of dimensions 1...
};

// A; for loads of boxes that end at any row: see "Ragged loads" in docs/architecture.md.
TensorView ViewA(const ForwardProblem& problem);
TensorView ViewRaggedA(const ForwardProblem& problem);

// All experts of dense weights, or the template for one expert: the base is then replaced on the
// device, and A's address stands in for it.
TensorView ViewB(const ForwardProblem& problem);

// D, or C, with an additional dimension of `box_rows`, so that a box can be cut off at any row. See
// "Ragged store" in docs/architecture.md.
TensorView ViewRaggedD(const ForwardProblem& problem, uint32_t box_rows);
TensorView ViewRaggedC(const ForwardProblem& problem, uint32_t box_rows);

// X and Y of weight gradients, for loads of boxes that end at any row, and D. See "Wgrad's maps" in
// docs/architecture.md.
TensorView ViewX(const WgradProblem& problem);
TensorView ViewY(const WgradProblem& problem);
TensorView ViewGradients(const WgradProblem& problem);

// The element is the view's: the table's may leave open which one.
// Writes to where the map stays: GCC 12 without optimisation misaligns a returned temporary.
void Encode(const Driver& driver, const TensorView& view, const MapSpec& spec, const Where& where,
            CUtensorMap* map);

}  // namespace jgg

#endif  // JGG_TENSOR_MAP_H_
