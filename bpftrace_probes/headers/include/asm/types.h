/* BCC includes this one as well; the types are the same. */
#pragma once
#include <linux/types.h>
