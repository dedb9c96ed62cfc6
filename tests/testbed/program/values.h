// Test values and expected results. A value depends on rank, element and a salt that changes with every operation, so data left over
// from an earlier operation is noticed. All exact results are small integers that every type represents.
#pragma once

#include <nccl.h>
#include <stddef.h>

#include <functional>
#include <vector>

namespace job {

size_t bytes_of(ncclDataType_t type);

// Expected results repeat with this period.
constexpr size_t kPeriod = 35;

// A reduction as the tests know it: NCCL's own, or PreMulSum with the factor 2.
struct ReductionKind {
  ncclRedOp_t op;  // handle to pass to NCCL
  bool premul = false;
};

double value_of(ncclDataType_t type, const ReductionKind& reduction, int rank, size_t index, long salt);
// The result of reducing the values of all ranks at this index.
double reduced_value(ncclDataType_t type, const ReductionKind& reduction, int ranks, size_t index, long salt);

// Writes count elements given by their value at index % kPeriod.
void fill(ncclDataType_t type, void* to, size_t count, const std::function<double(size_t)>& value);
// Elements that differ from the expectation (which has period kPeriod); `first` is the first of them.
size_t count_wrong(ncclDataType_t type, const void* data, size_t count, const std::function<double(size_t)>& expected, bool exact,
                   size_t* first);
double read_element(ncclDataType_t type, const void* data, size_t index);

}  // namespace job
