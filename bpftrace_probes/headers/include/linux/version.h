/* BCC puts a version into the program it loads; kernels since 5.0 do not look at it. */
#pragma once
#define KERNEL_VERSION(major, minor, patch) (((major) << 16) + ((minor) << 8) + (patch))
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 8, 0)
