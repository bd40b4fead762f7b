#include "order.h"

#include <algorithm>

namespace model {

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target_clones("avx2", "default")))
#endif
static void Max(Clock* into, const Clock* from, size_t n) {
  for (size_t i = 0; i < n; ++i) into[i] = std::max(into[i], from[i]);
}

void Clocks::Join(const Clocks& other) {
  if (!other.clocks_.empty()) Max(clocks_.data(), other.clocks_.data(), clocks_.size());
}

}  // namespace model
