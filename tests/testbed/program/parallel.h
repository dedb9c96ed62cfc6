// Where a rank stands in a parallel layout, and the communicators that follow from it.
#pragma once

#include <string>

namespace job {

// Sizes of the dimensions; ranks count through tensor first, then context, data, pipeline (Megatron-LM's order tp-cp-dp-pp). Expert
// groups are `expert` neighbours along the data dimension.
struct Layout {
  int tensor = 1, context = 1, data = 1, pipeline = 1, expert = 1;
};

struct Coordinates {
  int tensor, context, data, pipeline;
};

Coordinates place(const Layout& layout, int rank);

// A group of ranks that share all coordinates but one: its name (the same on all its members), the rank's position, and its size.
struct Membership {
  std::string name;
  int rank, ranks;
};
enum class Axis { kTensor, kContext, kData, kPipeline, kExpert, kModel };
Membership membership(const Layout& layout, int rank, Axis axis);

}  // namespace job
