// The arithmetic of reductions, on host memory.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "function.h"

namespace standin {

// An operator with its argument: the factor of PreMulSum, the divisor of SumPostDiv, the bit mask of MinMax.
struct Reduction {
  Operator op;
  Type type;
  uint64_t argument;
};

// to[i] = own[i] (op) received[i]; without `received` just own[i]. `own` is the rank's own input, to which PreMulSum applies;
// `last` says that the result is final, so SumPostDiv divides.
void reduce(const Reduction& reduction, void* to, const void* own, const void* received, size_t count, bool last);

}  // namespace standin
