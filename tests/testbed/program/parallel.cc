#include "parallel.h"

namespace job {

Coordinates place(const Layout& layout, int rank) {
  Coordinates at{};
  at.tensor = rank % layout.tensor, rank /= layout.tensor;
  at.context = rank % layout.context, rank /= layout.context;
  at.data = rank % layout.data, rank /= layout.data;
  at.pipeline = rank;
  return at;
}

Membership membership(const Layout& layout, int rank, Axis axis) {
  const Coordinates at = place(layout, rank);
  const auto name = [&](const char* prefix, int a, int b, int c) {
    return std::string(prefix) + "-" + std::to_string(a) + "-" + std::to_string(b) + "-" + std::to_string(c);
  };
  switch (axis) {
    case Axis::kTensor: return {name("tp", at.context, at.data, at.pipeline), at.tensor, layout.tensor};
    case Axis::kContext: return {name("cp", at.tensor, at.data, at.pipeline), at.context, layout.context};
    case Axis::kData:  // context ranks hold the same parameters, and gradients are summed over them too
      return {name("dp", at.tensor, 0, at.pipeline), at.data * layout.context + at.context, layout.data * layout.context};
    case Axis::kPipeline: return {name("pp", at.tensor, at.context, at.data), at.pipeline, layout.pipeline};
    case Axis::kExpert:
      return {name("ep", at.tensor, at.context, at.pipeline) + "-" + std::to_string(at.data / layout.expert), at.data % layout.expert,
              layout.expert};
    case Axis::kModel:  // all ranks that hold one copy of the model
      return {name("mp", at.context, at.data, 0), at.pipeline * layout.tensor + at.tensor, layout.tensor * layout.pipeline};
  }
  return {};
}

}  // namespace job
