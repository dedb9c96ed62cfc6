/* The kernel's integer types under the names BCC's helpers and our sources use. */
#pragma once

typedef unsigned char u8, __u8;
typedef unsigned short u16, __u16, __be16, __le16, __sum16;
typedef unsigned int u32, __u32, __be32, __le32, __wsum;
typedef unsigned long long u64, __u64, __be64, __le64;
typedef signed char s8, __s8;
typedef short s16, __s16;
typedef int s32, __s32, pid_t;
typedef long long s64, __s64;

typedef unsigned long size_t, uintptr_t;
typedef long ssize_t;
typedef _Bool bool;

enum { false = 0, true = 1 };

#define NULL ((void *)0)
#define __aligned_u64 __u64 __attribute__((aligned(8)))
