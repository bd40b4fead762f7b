#include "order.h"

#include <algorithm>

namespace model {

std::string Agents::Name(Event event) const {
  const uint32_t agent = event.agent & 0xffff;
  std::string name;
  if (agent == 0) {
    name = "nobody";
  } else if (agent < TensorPipe(0)) {
    const uint32_t cta = (agent - 1) / threads, thread = (agent - 1) % threads;
    name = "thread " + std::to_string(thread) + " (warp " + std::to_string(thread / kLanes) +
           ") of CTA " + std::to_string(cta);
  } else if (agent < Slot(0)) {
    const uint32_t cta = (agent - TensorPipe(0)) / OfCta(),
                   engine = (agent - TensorPipe(0)) % OfCta();
    const std::string of = " of CTA " + std::to_string(cta);
    if (engine == 0) {
      name = "the tensor pipe" + of;
    } else {
      name = (tensor_loads ? "a load from tensor memory by warp " : "wgmma of warp ") +
             std::to_string((engine - 1) / OfWarp()) + of;
    }
  } else {
    name = "a copy, or a remote store";
  }
  return name + " in cluster " + std::to_string(event.agent >> 16);
}

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
