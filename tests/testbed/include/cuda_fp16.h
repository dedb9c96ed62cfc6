// nccl.h includes this header but uses nothing of it in host code.
#pragma once
