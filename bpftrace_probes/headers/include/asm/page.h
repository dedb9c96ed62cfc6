/* BCC sizes its ring buffers in pages: of 4 KiB, unless the machine's are larger. */
#pragma once
#ifdef NW_PAGE_SIZE
#define PAGE_SIZE NW_PAGE_SIZE
#else
#define PAGE_SIZE 4096UL
#endif
