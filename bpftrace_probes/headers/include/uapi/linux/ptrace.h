#pragma once
#include <linux/ptrace.h>
