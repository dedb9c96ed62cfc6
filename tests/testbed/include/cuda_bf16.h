// nccl.h includes this header, uses nothing of it in host code, and declares ncclBfloat16 only if it says that the type exists.
#pragma once
#define __CUDA_BF16_TYPES_EXIST__ 1
